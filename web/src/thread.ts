// A helper thread: enters the module with its first message and stays there.

import * as threaded64 from "../wasm/memory64-threads.js";
import * as threaded from "../wasm/threads.js";
import { isMemory64 } from "./module.js";
import { parent } from "./runtime.js";
import type { FromThread, ThreadStart } from "./threads.js";

/** Bytes: kernels need little stack. */
const STACK_BYTES = 512 << 10;

const post = parent<ThreadStart, FromThread>((start) => {
  const { initSync, threadFollow, threadLost } = (isMemory64(start.module) ? threaded64 : threaded).instantiate();
  initSync({ ...start, thread_stack_size: STACK_BYTES });
  post({ type: "ready" });
  try {
    threadFollow();
  } catch (e) {
    // the engine's worker may be blocked on this thread and handle no messages
    threadLost();
    post({ type: "lost", why: (e as Error).message });
  }
});
