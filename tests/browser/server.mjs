// A server of the repository's files on this machine, with the faults that tests ask for.

import { createReadStream } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { pipeline } from "node:stream/promises";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { createGzip, gzipSync } from "node:zlib";

const root = fileURLToPath(new URL("../../", import.meta.url));
const types = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".css": "text/css",
  ".wasm": "application/wasm",
  ".json": "application/json",
};

/**
 * Serves `directory`. `requests` lists what was asked for, as "METHOD path range". Parameters of a URL are faults:
 * `drop=N` cuts the connection after N bytes of every answer, `slow=MS` waits between pieces, `html` sends a page,
 * `truncate=N` sends a shorter file, `norange` ignores ranges, `nolength` sends no length, `gzip` compresses where no range
 * is asked for, `packed` does too and sends the compressed length, `tag=T` is the ETag, `keep` lets browsers keep the answer, with `server.version` as the ETag.
 */
export async function serve(directory = root, headers = {}) {
  const requests = [];
  const server = createServer(async (request, response) => {
    const url = new URL(request.url, "http://localhost");
    const ask = url.searchParams;
    requests.push([request.method, url.pathname, request.headers.range].filter(Boolean).join(" "));
    const path = join(directory, normalize(decodeURIComponent(url.pathname)));
    const file = url.pathname.endsWith("/") ? join(path, "index.html") : path;
    const found = await stat(file).catch(() => null);
    if (!found?.isFile()) return response.writeHead(404).end("not found");
    if (ask.has("html"))
      return response.writeHead(200, { "content-type": "text/html" }).end("<!doctype html><title>Login</title>");
    const size = Number(ask.get("truncate") ?? found.size);
    const range = ask.has("norange") ? null : /^bytes=(\d+)-$/.exec(request.headers.range ?? "");
    const from = range ? Number(range[1]) : 0;
    const packed = (ask.has("gzip") || ask.has("packed")) && !range && /gzip/.test(request.headers["accept-encoding"]);
    const keep = ask.has("keep");
    const tag = `"${keep ? served.version : (ask.get("tag") ?? found.mtimeMs)}"`;
    const whole = packed && ask.has("packed") ? gzipSync(await readFile(file)) : undefined;
    response.writeHead(range ? 206 : 200, {
      "content-type": types[extname(file)] ?? "application/octet-stream",
      "accept-ranges": "bytes",
      etag: packed ? `W/${tag}` : tag,
      "cache-control": keep ? "max-age=3600" : "no-store",
      ...(packed ? { "content-encoding": "gzip" } : !ask.has("nolength") && { "content-length": size - from }),
      ...(whole && { "content-length": whole.length }),
      ...(range && { "content-range": `bytes ${from}-${size - 1}/${size}` }),
      ...headers,
    });
    if (request.method === "HEAD" || from >= size) return response.end();
    if (whole) return response.end(whole);
    const drop = Number(ask.get("drop") ?? Infinity);
    async function* pieces() {
      let sent = 0;
      for await (const piece of createReadStream(file, { start: from, end: size - 1, highWaterMark: 32 << 10 })) {
        yield piece;
        sent += piece.length;
        if (sent >= drop) {
          // after what was sent has left
          await new Promise((resolve) => setTimeout(resolve, 20));
          throw new Error("dropped");
        }
        if (ask.has("slow")) await new Promise((resolve) => setTimeout(resolve, Number(ask.get("slow"))));
      }
    }
    await pipeline(...[pieces, ...(packed ? [createGzip()] : []), response]).catch(() => {});
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const origin = `http://127.0.0.1:${server.address().port}`;
  const close = () => {
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  const served = { origin, requests, close, version: 0 };
  return served;
}
