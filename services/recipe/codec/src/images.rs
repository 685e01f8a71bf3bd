//! Image sizes: tokens an image takes, its size after preprocessing, and the size in its header
//! (recipe.md, sections 11.3 and 11.4). No pixel is decoded here.

use crate::types::{Detail, Error, Stage};

/// Vision patch, in pixels.
const PATCH_PX: u64 = 14;
/// One token covers this many pixels a side: a patch times the spatial downsample.
const TOKEN_PX: u64 = 42;
/// Longest side after the downscale of low detail, in pixels.
const LOW_DETAIL_MAX_PX: u64 = 512;
/// Longest side that WebP can hold, in pixels.
const WEBP_MAX_PX: u64 = 16_383;
const MAX_FIT_ROUNDS: usize = 10;
const MAX_WEBP_ROUNDS: usize = 6;

/// What a model's vision encoder takes; the defaults are those of the published one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one image at most, at least 8.
    pub max_tokens: u32,
    /// A smaller image is enlarged to about this area.
    pub min_pixels: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_tokens: 1024, min_pixels: 544 * 544 }
    }
}

/// Returns how many tokens an image of this size takes in the prompt.
///
/// Errors: internal, when fitting does not converge; no size is known that does it.
pub fn num_tokens(width: u32, height: u32, limits: Limits) -> Result<u32, Error> {
    let (width, height) = fit(u64::from(width), u64::from(height), limits)?;
    u32::try_from(tokens_of_fitted(width, height)).map_err(|_| not_converged())
}

/// Returns the size in pixels that preprocessing gives an image of this size.
///
/// The encoder's limit on the input's side (8192 px, or 4096 px with many images) is the caller's.
/// Errors: internal, when fitting does not converge.
pub fn target_size(
    width: u32,
    height: u32,
    detail: Detail,
    limits: Limits,
) -> Result<(u32, u32), Error> {
    let (width, height) = match detail {
        Detail::Low => limit_side(u64::from(width), u64::from(height), LOW_DETAIL_MAX_PX),
        Detail::High | Detail::Original | Detail::Auto => (u64::from(width), u64::from(height)),
    };
    let (mut width, mut height) = fit(width, height, limits)?;
    for _ in 0..MAX_WEBP_ROUNDS {
        let side = width.max(height);
        if side <= WEBP_MAX_PX {
            break;
        }
        let longest = WEBP_MAX_PX / PATCH_PX * PATCH_PX;
        let scale = longest as f64 / side as f64;
        let on_grid = |length: u64| {
            let num_patches = (length as f64 * scale / PATCH_PX as f64).ceil() as u64;
            (num_patches * PATCH_PX).min(longest)
        };
        (width, height) = fit(on_grid(width), on_grid(height), limits)?;
    }
    if width.max(height) > WEBP_MAX_PX {
        return Err(not_converged());
    }
    Ok((width as u32, height as u32))
}

fn limit_side(width: u64, height: u64, limit: u64) -> (u64, u64) {
    let side = width.max(height);
    if side <= limit {
        return (width, height);
    }
    let scale = limit as f64 / side as f64;
    let scaled = |length: u64| ((length as f64 * scale).round() as u64).max(1);
    (scaled(width), scaled(height))
}

/// A newline token for every row, one token at the start and one at the end.
fn tokens_of_fitted(width: u64, height: u64) -> u64 {
    let num_rows = height.div_ceil(TOKEN_PX);
    let num_columns = width.div_ceil(TOKEN_PX);
    num_rows * (num_columns + 1) + 2
}

/// Fits a size onto the patch grid, within the token limit, until it no longer changes.
fn fit(width: u64, height: u64, limits: Limits) -> Result<(u64, u64), Error> {
    let mut size = (width, height);
    for _ in 0..MAX_FIT_ROUNDS {
        let fitted = fit_once(size.0, size.1, limits);
        if fitted == size {
            return Ok(size);
        }
        size = fitted;
    }
    Err(not_converged())
}

fn not_converged() -> Error {
    Error::internal(Stage::Convert, "image resize calculation did not converge")
}

fn fit_once(width: u64, height: u64, limits: Limits) -> (u64, u64) {
    let (mut width, mut height) = (width, height);
    let area = width * height;
    let min_area = u64::from(limits.min_pixels);
    if 0 < area && area < min_area {
        let ratio = (min_area as f64 / area as f64).sqrt();
        width = (width as f64 * ratio) as u64;
        height = (height as f64 * ratio) as u64;
    }
    let fitted = (width.div_ceil(PATCH_PX) * PATCH_PX, height.div_ceil(PATCH_PX) * PATCH_PX);
    let max_tokens = u64::from(limits.max_tokens);
    if tokens_of_fitted(fitted.0, fitted.1) > max_tokens {
        return shrink(width, height, max_tokens);
    }
    fitted
}

/// The largest size of about this shape within the token limit, on the patch grid.
fn shrink(width: u64, height: u64, max_tokens: u64) -> (u64, u64) {
    let (wide, high) = (width as f64, height as f64);
    let token_px = TOKEN_PX as f64;
    let ratio = high / wide;
    let max_columns = ((max_tokens - 2) as f64 / ratio + 0.25).sqrt() - 0.5;
    let max_rows = max_columns * ratio;
    if max_columns < 1.0 {
        return (TOKEN_PX, (max_tokens - 2) / 2 * TOKEN_PX);
    }
    if max_rows < 1.0 {
        return ((max_tokens - 3) * TOKEN_PX, TOKEN_PX);
    }
    let scale = (max_columns.trunc() * token_px / wide).min(max_rows.trunc() * token_px / high);
    let on_grid = |length: f64| (length * scale / PATCH_PX as f64) as u64 * PATCH_PX;
    (on_grid(wide), on_grid(high))
}

/// Returns width and height in pixels from the header of a PNG, JPEG, GIF or WebP image, without
/// decoding it; `None` when the bytes are none of these or end too early.
///
/// The type is told by the bytes alone, never by what the sender says it is.
pub fn dimensions(bytes: &[u8]) -> Option<(u32, u32)> {
    png_dimensions(bytes)
        .or_else(|| gif_dimensions(bytes))
        .or_else(|| webp_dimensions(bytes))
        .or_else(|| jpeg_dimensions(bytes))
}

fn png_dimensions(bytes: &[u8]) -> Option<(u32, u32)> {
    let rest = bytes.strip_prefix(b"\x89PNG\r\n\x1a\n")?;
    let header = rest.get(4..)?.strip_prefix(b"IHDR")?;
    let side = |at: usize| {
        let side = header.get(at..at + 4)?;
        Some(u32::from_be_bytes([side[0], side[1], side[2], side[3]]))
    };
    Some((side(0)?, side(4)?))
}

fn gif_dimensions(bytes: &[u8]) -> Option<(u32, u32)> {
    let screen = bytes.strip_prefix(b"GIF87a").or_else(|| bytes.strip_prefix(b"GIF89a"))?;
    Some((little_endian(screen, 0, 2)?, little_endian(screen, 2, 2)?))
}

fn webp_dimensions(bytes: &[u8]) -> Option<(u32, u32)> {
    let chunk = bytes.strip_prefix(b"RIFF")?.get(4..)?.strip_prefix(b"WEBP")?;
    let (kind, body) = (chunk.get(..4)?, chunk.get(8..)?);
    match kind {
        b"VP8 " => {
            let sides = body.get(3..)?.strip_prefix(b"\x9d\x01\x2a")?;
            // The two top bits of each are an upscale hint.
            Some((little_endian(sides, 0, 2)? & 0x3fff, little_endian(sides, 2, 2)? & 0x3fff))
        }
        b"VP8L" => {
            let bits = little_endian(body.strip_prefix(b"\x2f")?, 0, 4)?;
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => Some((little_endian(body, 4, 3)? + 1, little_endian(body, 7, 3)? + 1)),
        _ => None,
    }
}

/// Walks the segments up to the frame header.
fn jpeg_dimensions(bytes: &[u8]) -> Option<(u32, u32)> {
    let mut rest = bytes.strip_prefix(b"\xff\xd8")?;
    loop {
        let (&[0xff, marker], after) = rest.split_first_chunk::<2>()? else { return None };
        match marker {
            // Fill bytes before a marker.
            0xff => rest = &rest[1..],
            // Markers without a body.
            0x01 | 0xd0..=0xd8 => rest = after,
            // The end, or the image data: no frame header came.
            0xd9 | 0xda => return None,
            _ => {
                let length = usize::from(u16::from_be_bytes([*after.first()?, *after.get(1)?]));
                let is_frame =
                    matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc);
                if is_frame {
                    let side = |at: usize| {
                        Some(u32::from(u16::from_be_bytes([*after.get(at)?, *after.get(at + 1)?])))
                    };
                    return Some((side(5)?, side(3)?));
                }
                rest = after.get(length.max(2)..)?;
            }
        }
    }
}

fn little_endian(bytes: &[u8], at: usize, num_bytes: usize) -> Option<u32> {
    let field = bytes.get(at..at + num_bytes)?;
    Some(field.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte)))
}
