// The native command, and servers of it.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("../../", import.meta.url));
/** The native command; STARLING says where it is. */
export const command = process.env.STARLING ?? `${process.env.CARGO_TARGET_DIR ?? `${root}target`}/release/starling`;

/** Starts a server of a model file. `post(path, body)` returns the response. */
export async function startServer(model, ...more) {
  const args = ["serve", "--model", model, "--port", "0", ...more];
  const server = spawn(command, args, { stdio: ["ignore", "pipe", "ignore"] });
  const origin = (await once(createInterface(server.stdout), "line"))[0].trim();
  const headers = { "content-type": "application/json" };
  return {
    origin,
    post: (path, body) => fetch(origin + path, { method: "POST", headers, body: JSON.stringify(body) }),
    stop: () => server.kill(),
  };
}
