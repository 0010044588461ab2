// A worker that helps the engine's: from its one message on it is inside the module.

import { instantiate } from "../wasm/threads.js";
import type { FromThread, ThreadStart } from "./threads.js";

const post = (message: FromThread) => postMessage(message);

/** Bytes of its stack: kernels need little, and every thread has one. */
const STACK = 512 << 10;

const { initSync, threadFollow, threadLost } = instantiate();

addEventListener("message", ({ data }: MessageEvent<ThreadStart>) => {
  initSync({ ...data, thread_stack_size: STACK });
  post({ type: "ready" });
  try {
    threadFollow();
  } catch (e) {
    // the engine's worker may wait for this one, without looking at messages
    threadLost();
    post({ type: "lost", why: (e as Error).message });
  }
});
