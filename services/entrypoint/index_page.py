"""The page at `/`: what this is, and three examples to paste."""

from __future__ import annotations

from typing import Final

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Pelagos</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}}
pre{{background:#f4f4f5;padding:1rem;overflow-x:auto}}code{{font-size:.9em}}</style></head><body>
<h1>Pelagos</h1>
<p>An inference system for DeepSeek-V4.1-Flash-class models. This is its entrypoint; it speaks
Chat Completions, Responses and Messages. Put your key into <code>$KEY</code>.</p>
<h2>Chat Completions</h2>
<pre>curl {base}/v1/chat/completions -H "Authorization: Bearer $KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "stream": true,
       "messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<h2>Responses</h2>
<pre>curl {base}/v1/responses -H "Authorization: Bearer $KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "input": "Hello"}}'</pre>
<h2>Messages</h2>
<pre>curl {base}/v1/messages -H "x-api-key: $KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "max_tokens": 256,
       "messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<p>Models: <code>GET /v1/models</code>. Health: <code>/healthz</code>, <code>/readyz</code>.</p>
</body></html>
"""


def render(base_url: str, model: str) -> bytes:
    """Returns the page. Both arguments are ours, never a caller's."""
    return _PAGE.format(base=base_url, model=model).encode()
