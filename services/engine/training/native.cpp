// The network's pointwise parts and its attention with their gradients, for one core.
//
// Everything about a token is done while it lies in the first cache, nothing is kept for the
// gradients but the inputs. Sizes are constants of the build. Source: model.md, sections 4 to 7
// and 12; the plain versions beside which these are tested are in ops.py.
//
// H heads of DH channels, W window, K chosen entries, HI x DI the indexer, M streams of D channels,
// ROUNDS of Sinkhorn's iteration.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

typedef float Heads __attribute__((vector_size(4 * H)));
typedef float IndexHeads __attribute__((vector_size(4 * HI)));

constexpr int KEYS = W + K;
constexpr int NZ = M * (M + 2);
constexpr int TILE = 16;  // tokens whose mixing matrices are made doubly stochastic together

// --- attention ----------------------------------------------------------------------------------

struct Seen {
  int count = 0;
  const float* key[KEYS];
  float* grad[KEYS];
  int slot[KEYS];  // which of the K, -1 for the window
};

void look(Seen& seen, int64_t t, int64_t length, const float* kv, const float* entries,
          const int64_t* at, float* dkv, float* dentries) {
  const int64_t position = t % length;
  seen.count = 0;
  for (int64_t p = t - std::min<int64_t>(position, W - 1); p <= t; ++p) {
    seen.key[seen.count] = kv + p * DH;
    seen.grad[seen.count] = dkv ? dkv + p * DH : nullptr;
    seen.slot[seen.count++] = -1;
  }
  if (!at) return;
  for (int k = 0; k < K; ++k) {
    const int64_t row = at[t * K + k];
    if (row < 0) continue;
    seen.key[seen.count] = entries + row * DH;
    seen.grad[seen.count] = dentries ? dentries + row * DH : nullptr;
    seen.slot[seen.count++] = k;
  }
}

template <int N, int C, typename Lanes>
void transpose(const float* from, Lanes* to) {
  float* flat = reinterpret_cast<float*>(to);
  for (int h = 0; h < N; ++h)
    for (int c = 0; c < C; ++c) flat[c * N + h] = from[h * C + c];
}

// Products of every key with every head: [key] -> lanes of heads.
template <int C, typename Lanes>
void products(const float* const* keys, int count, const Lanes* queries, Lanes* out) {
  int k = 0;
  for (; k + 4 <= count; k += 4) {
    Lanes a = {}, b = {}, c = {}, d = {};
    const float *ka = keys[k], *kb = keys[k + 1], *kc = keys[k + 2], *kd = keys[k + 3];
    for (int i = 0; i < C; ++i) {
      const Lanes q = queries[i];
      a += ka[i] * q;
      b += kb[i] * q;
      c += kc[i] * q;
      d += kd[i] * q;
    }
    out[k] = a, out[k + 1] = b, out[k + 2] = c, out[k + 3] = d;
  }
  for (; k < count; ++k) {
    Lanes a = {};
    for (int i = 0; i < C; ++i) a += keys[k][i] * queries[i];
    out[k] = a;
  }
}

// Turns scaled products into weights in place; returns the sink's.
Heads softmax(Heads* p, int count, const float* sink) {
  Heads peak;
  for (int h = 0; h < H; ++h) peak[h] = sink[h];
  for (int k = 0; k < count; ++k) {
    p[k] *= float(SCALE);
    for (int h = 0; h < H; ++h) peak[h] = std::max(peak[h], p[k][h]);
  }
  float* flat = reinterpret_cast<float*>(p);
  for (int k = 0; k < count; ++k) p[k] -= peak;
  for (int i = 0; i < count * H; ++i) flat[i] = std::exp(flat[i]);
  Heads rest, total;
  for (int h = 0; h < H; ++h) rest[h] = std::exp(sink[h] - peak[h]);
  total = rest;
  for (int k = 0; k < count; ++k) total += p[k];
  const Heads share = 1.0f / total;
  for (int k = 0; k < count; ++k) p[k] *= share;
  return rest * share;
}

// out[h] = sum over keys of weights[key][h] * key, times `scale`.
void weighted(const Seen& seen, const Heads* weights, float scale, float* out) {
  for (int h = 0; h < H; ++h) {
    float sum[DH] = {};
    for (int k = 0; k < seen.count; ++k) {
      const float w = weights[k][h];
      const float* key = seen.key[k];
      for (int c = 0; c < DH; ++c) sum[c] += w * key[c];
    }
    for (int c = 0; c < DH; ++c) out[h * DH + c] = scale * sum[c];
  }
}

// --- hyper-connections --------------------------------------------------------------------------

struct Sinkhorn {
  float s[M][M][TILE];
  float across[ROUNDS][M][TILE], down[ROUNDS][M][TILE];
  float p[M][M][TILE];

  void run(float logits[M][M][TILE]) {
    for (int i = 0; i < M; ++i) {
      float peak[TILE], total[TILE] = {};
      for (int t = 0; t < TILE; ++t) peak[t] = logits[i][0][t];
      for (int j = 1; j < M; ++j)
        for (int t = 0; t < TILE; ++t) peak[t] = std::max(peak[t], logits[i][j][t]);
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) p[i][j][t] = std::exp(logits[i][j][t] - peak[t]);
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) total[t] += p[i][j][t];
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) {
          p[i][j][t] /= total[t];
          s[i][j][t] = p[i][j][t] + float(HC_EPS);
        }
    }
    for (int j = 0; j < M; ++j)
      for (int t = 0; t < TILE; ++t) {
        float mass = float(HC_EPS);
        for (int i = 0; i < M; ++i) mass += s[i][j][t];
        down[0][j][t] = 1 / mass;
        across[0][j][t] = 1;
      }
    for (int r = 1; r < ROUNDS; ++r) {
      for (int i = 0; i < M; ++i)
        for (int t = 0; t < TILE; ++t) {
          float mass = 0;
          for (int j = 0; j < M; ++j) mass += s[i][j][t] * down[r - 1][j][t];
          const float old = across[r - 1][i][t];
          across[r][i][t] = old / (old * mass + float(HC_EPS));
        }
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) {
          float mass = 0;
          for (int i = 0; i < M; ++i) mass += s[i][j][t] * across[r][i][t];
          const float old = down[r - 1][j][t];
          down[r][j][t] = old / (old * mass + float(HC_EPS));
        }
    }
  }

  float value(int i, int j, int t) const {
    return s[i][j][t] * across[ROUNDS - 1][i][t] * down[ROUNDS - 1][j][t];
  }

  // Turns the gradient of the result into that of the logits, in place.
  void back(float g[M][M][TILE]) const {
    float ga[M][TILE] = {}, gd[M][TILE] = {}, gs[M][M][TILE];
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) {
          const float a = across[ROUNDS - 1][i][t], d = down[ROUNDS - 1][j][t];
          gs[i][j][t] = g[i][j][t] * a * d;
          ga[i][t] += g[i][j][t] * s[i][j][t] * d;
          gd[j][t] += g[i][j][t] * s[i][j][t] * a;
        }
    for (int r = ROUNDS - 1; r > 0; --r) {
      for (int j = 0; j < M; ++j)
        for (int t = 0; t < TILE; ++t) {
          const float now = down[r][j][t], kept = now / down[r - 1][j][t];
          const float gm = -gd[j][t] * now * now;
          gd[j][t] *= float(HC_EPS) * kept * kept;
          for (int i = 0; i < M; ++i) {
            gs[i][j][t] += gm * across[r][i][t];
            ga[i][t] += gm * s[i][j][t];
          }
        }
      for (int i = 0; i < M; ++i)
        for (int t = 0; t < TILE; ++t) {
          const float now = across[r][i][t], kept = now / across[r - 1][i][t];
          const float gm = -ga[i][t] * now * now;
          ga[i][t] *= float(HC_EPS) * kept * kept;
          for (int j = 0; j < M; ++j) {
            gs[i][j][t] += gm * down[r - 1][j][t];
            gd[j][t] += gm * s[i][j][t];
          }
        }
    }
    for (int j = 0; j < M; ++j)
      for (int t = 0; t < TILE; ++t) {
        const float gm = -gd[j][t] * down[0][j][t] * down[0][j][t];
        for (int i = 0; i < M; ++i) gs[i][j][t] += gm;
      }
    for (int i = 0; i < M; ++i)
      for (int t = 0; t < TILE; ++t) {
        float mean = 0;
        for (int j = 0; j < M; ++j) mean += gs[i][j][t] * p[i][j][t];
        for (int j = 0; j < M; ++j) g[i][j][t] = p[i][j][t] * (gs[i][j][t] - mean);
      }
  }
};

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float statistic(const float* h) {
  float sum = 0;
  for (int c = 0; c < M * D; ++c) sum += h[c] * h[c];
  return 1 / std::sqrt(sum / (M * D) + float(NORM_EPS));
}

void logits_of(float out[M][M][TILE], int64_t first, int64_t n, const float* z, const float* h,
               const float* base, const float* scale, float* r) {
  for (int t = 0; t < TILE; ++t) {
    const int64_t row = std::min(first + t, n - 1);
    r[t] = statistic(h + row * M * D);
    for (int e = 0; e < M * M; ++e)
      out[e / M][e % M][t] = z[row * NZ + 2 * M + e] * r[t] * scale[2] + base[2 * M + e];
  }
}

}  // namespace

extern "C" {

void attention(int64_t n, int64_t length, const float* q, const float* kv, const float* entries,
               const int64_t* at, const float* sink, float* out, float* mass) {
  Seen seen;
  Heads queries[DH], p[KEYS];
  for (int64_t t = 0; t < n; ++t) {
    look(seen, t, length, kv, entries, at, nullptr, nullptr);
    transpose<H, DH>(q + t * H * DH, queries);
    products<DH>(seen.key, seen.count, queries, p);
    softmax(p, seen.count, sink);
    weighted(seen, p, 1.0f, out + t * H * DH);
    if (!at) continue;
    for (int k = 0; k < K; ++k) mass[t * K + k] = 0;
    for (int k = 0; k < seen.count; ++k) {
      if (seen.slot[k] < 0) continue;
      float sum = 0;
      for (int h = 0; h < H; ++h) sum += p[k][h];
      mass[t * K + seen.slot[k]] = sum / H;
    }
  }
}

void attention_back(int64_t n, int64_t length, const float* q, const float* kv,
                    const float* entries, const int64_t* at, const float* sink, const float* g,
                    float* dq, float* dkv, float* dentries, float* dsink) {
  Seen seen;
  Heads queries[DH], grads[DH], p[KEYS], dp[KEYS], sinks = {};
  for (int64_t t = 0; t < n; ++t) {
    const float *query = q + t * H * DH, *grad = g + t * H * DH;
    look(seen, t, length, kv, entries, at, dkv, dentries);
    transpose<H, DH>(query, queries);
    transpose<H, DH>(grad, grads);
    products<DH>(seen.key, seen.count, queries, p);
    const Heads rest = softmax(p, seen.count, sink);
    products<DH>(seen.key, seen.count, grads, dp);
    Heads inner = {};
    for (int k = 0; k < seen.count; ++k) inner += p[k] * dp[k];
    sinks -= rest * inner;
    for (int k = 0; k < seen.count; ++k) dp[k] = p[k] * (dp[k] - inner);
    weighted(seen, dp, float(SCALE), dq + t * H * DH);
    for (int k = 0; k < seen.count; ++k) {
      float sum[DH] = {};
      for (int h = 0; h < H; ++h) {
        const float a = p[k][h], b = float(SCALE) * dp[k][h];
        for (int c = 0; c < DH; ++c) sum[c] += a * grad[h * DH + c] + b * query[h * DH + c];
      }
      float* into = seen.grad[k];
      for (int c = 0; c < DH; ++c) into[c] += sum[c];
    }
  }
  for (int h = 0; h < H; ++h) dsink[h] = sinks[h];
}

// The K best visible entries of every row, ascending, -1 padded; ties take the lower index.
// blocks: [n, count] ascending, -1 padded; read where `restricted`, written where not and not null.
void choose(int64_t n, int64_t length, int64_t ratio, const float* q, const float* weights,
            const float* keys, int64_t size, int64_t count, int restricted, int64_t* blocks,
            int64_t* out) {
  const int64_t entries = length / ratio;
  IndexHeads queries[DI];
  std::vector<float> score(entries), best(entries / size + 1);
  std::vector<int64_t> order(entries / size + 1);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t visible = (t % length + 1) / ratio;
    const float* own = keys + (t / length) * entries * DI;
    transpose<HI, DI>(q + t * HI * DI, queries);
    IndexHeads w;
    for (int h = 0; h < HI; ++h) w[h] = weights[t * HI + h];
    auto measure = [&](int64_t begin, int64_t end) {
      const IndexHeads zero = {};
      for (int64_t j = begin; j < end; j += 4) {
        const int num = int(std::min<int64_t>(4, end - j));
        const float* at[4];
        IndexHeads found[4];
        for (int i = 0; i < num; ++i) at[i] = own + (j + i) * DI;
        products<DI>(at, num, queries, found);
        for (int i = 0; i < num; ++i) {
          const IndexHeads x = (found[i] > zero ? found[i] : zero) * w;
          float sum = 0;
          for (int h = 0; h < HI; ++h) sum += x[h];
          score[j + i] = sum;
        }
      }
    };
    int taken = 0;
    float value[K];
    int64_t id[K];
    auto offer = [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const float s = score[j];
        if (taken == K && s <= value[K - 1]) continue;
        int place = taken < K ? taken++ : K - 1;
        for (; place > 0 && value[place - 1] < s; --place)
          value[place] = value[place - 1], id[place] = id[place - 1];
        value[place] = s, id[place] = j;
      }
    };
    if (restricted) {
      for (int64_t b = 0; b < count; ++b) {
        const int64_t block = blocks[t * count + b];
        if (block < 0) break;
        const int64_t begin = block * size, end = std::min(visible, begin + size);
        measure(begin, end);
        offer(begin, end);
      }
    } else {
      measure(0, visible);
      offer(0, visible);
    }
    std::sort(id, id + taken);
    for (int k = 0; k < K; ++k) out[t * K + k] = k < taken ? id[k] : -1;
    if (restricted || !blocks) continue;
    const int64_t num = (visible + size - 1) / size;
    for (int64_t b = 0; b < num; ++b) {
      best[b] = *std::max_element(score.begin() + b * size,
                                  score.begin() + std::min(visible, (b + 1) * size));
      order[b] = b;
    }
    if (num) best[num - 1] = std::numeric_limits<float>::max();
    const int64_t kept = std::min(num, count);
    std::partial_sort(order.begin(), order.begin() + kept, order.begin() + num,
                      [&](int64_t a, int64_t b) {
                        return best[a] != best[b] ? best[a] > best[b] : a < b;
                      });
    std::sort(order.begin(), order.begin() + kept);
    for (int64_t b = 0; b < count; ++b) blocks[t * count + b] = b < kept ? order[b] : -1;
  }
}

// Scores of chosen entries, [n, K]; 0 where empty.
void scores(int64_t n, const float* q, const float* weights, const float* keys, const int64_t* at,
            float* out) {
  IndexHeads queries[DI], found[K];
  for (int64_t t = 0; t < n; ++t) {
    transpose<HI, DI>(q + t * HI * DI, queries);
    const float* own[K];
    for (int k = 0; k < K; ++k) own[k] = keys + std::max<int64_t>(0, at[t * K + k]) * DI;
    products<DI>(own, K, queries, found);
    for (int k = 0; k < K; ++k) {
      float sum = 0;
      for (int h = 0; h < HI; ++h) sum += std::max(found[k][h], 0.0f) * weights[t * HI + h];
      out[t * K + k] = at[t * K + k] < 0 ? 0 : sum;
    }
  }
}

void scores_back(int64_t n, const float* q, const float* weights, const float* keys,
                 const int64_t* at, const float* g, float* dq, float* dweights, float* dkeys) {
  IndexHeads queries[DI], found[K];
  for (int64_t t = 0; t < n; ++t) {
    const float* query = q + t * HI * DI;
    transpose<HI, DI>(query, queries);
    const float* own[K];
    for (int k = 0; k < K; ++k) own[k] = keys + std::max<int64_t>(0, at[t * K + k]) * DI;
    products<DI>(own, K, queries, found);
    float *into = dq + t * HI * DI, dw[HI] = {};
    std::memset(into, 0, sizeof(float) * HI * DI);
    for (int k = 0; k < K; ++k) {
      if (at[t * K + k] < 0) continue;
      const float grad = g[t * K + k];
      float* back = dkeys + at[t * K + k] * DI;
      for (int h = 0; h < HI; ++h) {
        const float x = found[k][h];
        if (x <= 0) continue;
        dw[h] += grad * x;
        const float s = grad * weights[t * HI + h];
        for (int c = 0; c < DI; ++c) {
          into[h * DI + c] += s * own[k][c];
          back[c] += s * query[h * DI + c];
        }
      }
    }
    for (int h = 0; h < HI; ++h) dweights[t * HI + h] = dw[h];
  }
}

// pre, post [n, M], comb [n, M, M] of a site; z: [n, M * (M + 2)], streams times `fn`.
void mixes(int64_t n, const float* z, const float* h, const float* base, const float* scale,
           float* pre, float* post, float* comb) {
  Sinkhorn mix;
  float logits[M][M][TILE], r[TILE];
  for (int64_t first = 0; first < n; first += TILE) {
    logits_of(logits, first, n, z, h, base, scale, r);
    mix.run(logits);
    for (int t = 0; t < TILE && first + t < n; ++t) {
      const int64_t row = first + t;
      for (int m = 0; m < M; ++m) {
        pre[row * M + m] = sigmoid(z[row * NZ + m] * r[t] * scale[0] + base[m]) + float(HC_EPS);
        post[row * M + m] = 2 * sigmoid(z[row * NZ + M + m] * r[t] * scale[1] + base[M + m]);
      }
      for (int e = 0; e < M * M; ++e) comb[row * M * M + e] = mix.value(e / M, e % M, t);
    }
  }
}

void mixes_back(int64_t n, const float* z, const float* h, const float* base, const float* scale,
                const float* gpre, const float* gpost, const float* gcomb, float* dz, float* dh,
                float* dbase, float* dscale) {
  Sinkhorn mix;
  float logits[M][M][TILE], g[M][M][TILE], r[TILE];
  double bases[NZ] = {}, scales[3] = {};
  for (int64_t first = 0; first < n; first += TILE) {
    logits_of(logits, first, n, z, h, base, scale, r);
    mix.run(logits);
    for (int t = 0; t < TILE; ++t) {
      const int64_t row = std::min(first + t, n - 1);
      for (int e = 0; e < M * M; ++e) g[e / M][e % M][t] = gcomb[row * M * M + e];
    }
    mix.back(g);
    for (int t = 0; t < TILE && first + t < n; ++t) {
      const int64_t row = first + t;
      const float *own = z + row * NZ, *streams = h + row * M * D;
      float before[NZ];  // gradient of the scaled and shifted logits
      for (int m = 0; m < M; ++m) {
        const float a = sigmoid(own[m] * r[t] * scale[0] + base[m]);
        before[m] = gpre[row * M + m] * a * (1 - a);
        const float b = sigmoid(own[M + m] * r[t] * scale[1] + base[M + m]);
        before[M + m] = 2 * gpost[row * M + m] * b * (1 - b);
      }
      for (int e = 0; e < M * M; ++e) before[2 * M + e] = g[e / M][e % M][t];
      float dr = 0;
      for (int e = 0; e < NZ; ++e) {
        const int kind = e < M ? 0 : e < 2 * M ? 1 : 2;
        bases[e] += before[e];
        scales[kind] += before[e] * own[e] * r[t];
        const float through = before[e] * scale[kind];
        dr += through * own[e];
        dz[row * NZ + e] = through * r[t];
      }
      const float factor = -dr * r[t] * r[t] * r[t] / (M * D);
      for (int c = 0; c < M * D; ++c) dh[row * M * D + c] = factor * streams[c];
    }
  }
  for (int e = 0; e < NZ; ++e) dbase[e] = float(bases[e]);
  for (int e = 0; e < 3; ++e) dscale[e] = float(scales[e]);
}

// The normed mix of the streams, [n, D].
void collapse_norm(int64_t n, const float* h, const float* pre, const float* weight, float* out) {
  for (int64_t t = 0; t < n; ++t) {
    const float* streams = h + t * M * D;
    float x[D], sum = 0;
    for (int c = 0; c < D; ++c) {
      float v = 0;
      for (int m = 0; m < M; ++m) v += pre[t * M + m] * streams[m * D + c];
      x[c] = v;
      sum += v * v;
    }
    const float r = 1 / std::sqrt(sum / D + float(NORM_EPS));
    for (int c = 0; c < D; ++c) out[t * D + c] = x[c] * r * weight[c];
  }
}

void collapse_norm_back(int64_t n, const float* h, const float* pre, const float* weight,
                        const float* g, float* dh, float* dpre, float* dweight) {
  std::memset(dweight, 0, sizeof(float) * D);
  for (int64_t t = 0; t < n; ++t) {
    const float *streams = h + t * M * D, *grad = g + t * D;
    float x[D], dx[D], sum = 0, inner = 0;
    for (int c = 0; c < D; ++c) {
      float v = 0;
      for (int m = 0; m < M; ++m) v += pre[t * M + m] * streams[m * D + c];
      x[c] = v;
      sum += v * v;
      inner += v * weight[c] * grad[c];
    }
    const float r = 1 / std::sqrt(sum / D + float(NORM_EPS)), back = inner * r * r * r / D;
    for (int c = 0; c < D; ++c) {
      dweight[c] += grad[c] * x[c] * r;
      dx[c] = grad[c] * weight[c] * r - x[c] * back;
    }
    for (int m = 0; m < M; ++m) {
      float dot = 0;
      for (int c = 0; c < D; ++c) {
        dot += dx[c] * streams[m * D + c];
        dh[(t * M + m) * D + c] = pre[t * M + m] * dx[c];
      }
      dpre[t * M + m] = dot;
    }
  }
}

// The streams after a site, [n, M, D].
void expand(int64_t n, const float* y, const float* h, const float* post, const float* comb,
            float* out) {
  for (int64_t t = 0; t < n; ++t) {
    const float *streams = h + t * M * D, *mix = comb + t * M * M;
    for (int j = 0; j < M; ++j)
      for (int c = 0; c < D; ++c) {
        float v = post[t * M + j] * y[t * D + c];
        for (int i = 0; i < M; ++i) v += mix[i * M + j] * streams[i * D + c];
        out[(t * M + j) * D + c] = v;
      }
  }
}

void expand_back(int64_t n, const float* y, const float* h, const float* post, const float* comb,
                 const float* g, float* dy, float* dh, float* dpost, float* dcomb) {
  for (int64_t t = 0; t < n; ++t) {
    const float *streams = h + t * M * D, *mix = comb + t * M * M, *grad = g + t * M * D;
    for (int c = 0; c < D; ++c) {
      float v = 0;
      for (int j = 0; j < M; ++j) v += post[t * M + j] * grad[j * D + c];
      dy[t * D + c] = v;
    }
    for (int i = 0; i < M; ++i)
      for (int c = 0; c < D; ++c) {
        float v = 0;
        for (int j = 0; j < M; ++j) v += mix[i * M + j] * grad[j * D + c];
        dh[(t * M + i) * D + c] = v;
      }
    for (int j = 0; j < M; ++j) {
      float own = 0, dots[M] = {};
      for (int c = 0; c < D; ++c) {
        const float v = grad[j * D + c];
        own += v * y[t * D + c];
        for (int i = 0; i < M; ++i) dots[i] += v * streams[i * D + c];
      }
      dpost[t * M + j] = own;
      for (int i = 0; i < M; ++i) dcomb[t * M * M + i * M + j] = dots[i];
    }
  }
}

void rms(int64_t n, int64_t width, const float* x, const float* weight, float* out) {
  for (int64_t t = 0; t < n; ++t) {
    const float* row = x + t * width;
    float sum = 0;
    for (int64_t c = 0; c < width; ++c) sum += row[c] * row[c];
    const float r = 1 / std::sqrt(sum / width + float(NORM_EPS));
    for (int64_t c = 0; c < width; ++c) out[t * width + c] = row[c] * r * weight[c];
  }
}

void rms_back(int64_t n, int64_t width, const float* x, const float* weight, const float* g,
              float* dx, float* dweight) {
  std::memset(dweight, 0, sizeof(float) * width);
  for (int64_t t = 0; t < n; ++t) {
    const float *row = x + t * width, *grad = g + t * width;
    float sum = 0, inner = 0;
    for (int64_t c = 0; c < width; ++c) {
      sum += row[c] * row[c];
      inner += row[c] * weight[c] * grad[c];
    }
    const float r = 1 / std::sqrt(sum / width + float(NORM_EPS)), back = inner * r * r * r / width;
    for (int64_t c = 0; c < width; ++c) {
      dweight[c] += grad[c] * row[c] * r;
      dx[t * width + c] = grad[c] * weight[c] * r - row[c] * back;
    }
  }
}

// Turns adjacent pairs of the last 2 * pairs channels; turns: [n, pairs] (cos, sin).
void rotate(int64_t n, int64_t heads, int64_t width, int64_t pairs, const float* x,
            const float* turns, float sign, float* out) {
  const int64_t still = width - 2 * pairs;
  for (int64_t t = 0; t < n; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x + (t * heads + h) * width;
      float* to = out + (t * heads + h) * width;
      for (int64_t c = 0; c < still; ++c) to[c] = from[c];
      for (int64_t i = 0; i < pairs; ++i) {
        const float c = turns[(t * pairs + i) * 2], s = sign * turns[(t * pairs + i) * 2 + 1];
        const float a = from[still + 2 * i], b = from[still + 2 * i + 1];
        to[still + 2 * i] = a * c - b * s;
        to[still + 2 * i + 1] = a * s + b * c;
      }
    }
}

// Clamped SwiGLU times a weight per row (null: 1).
void swiglu(int64_t n, int64_t width, const float* gate, const float* up, const float* weights,
            float* out) {
  for (int64_t t = 0; t < n; ++t) {
    const float w = weights ? weights[t] : 1;
    for (int64_t c = t * width; c < (t + 1) * width; ++c) {
      const float a = std::min(gate[c], float(LIMIT));
      const float b = std::max(std::min(up[c], float(LIMIT)), -float(LIMIT));
      out[c] = w * b * a / (1 + std::exp(-a));
    }
  }
}

void swiglu_back(int64_t n, int64_t width, const float* gate, const float* up,
                 const float* weights, const float* g, float* dgate, float* dup,
                 float* dweights) {
  for (int64_t t = 0; t < n; ++t) {
    const float w = weights ? weights[t] : 1;
    float dot = 0;
    for (int64_t c = t * width; c < (t + 1) * width; ++c) {
      const float a = std::min(gate[c], float(LIMIT));
      const float b = std::max(std::min(up[c], float(LIMIT)), -float(LIMIT));
      const float s = 1 / (1 + std::exp(-a)), silu = a * s;
      dot += g[c] * silu * b;
      dgate[c] = gate[c] > float(LIMIT) ? 0 : w * g[c] * b * (s + silu * (1 - s));
      dup[c] = std::fabs(up[c]) > float(LIMIT) ? 0 : w * g[c] * silu;
    }
    if (dweights) dweights[t] = dot;
  }
}

}  // extern "C"
