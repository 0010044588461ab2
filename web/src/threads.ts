// Workers that help the engine's: they have its module and its memory. Only where memory can be shared.

import { StarlingError } from "./errors.js";
import { importsMemory } from "./instance.js";
import { startWorker } from "./script.js";

/** What a helper is sent, once. */
export interface ThreadStart {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
}

/** What a helper says: that it begins, and why it ended. */
export type FromThread = { type: "ready" } | { type: "lost"; why: string };

/**
 * The workers that help an engine. They end with its worker, which the page ends, and not before: of those that were
 * ending when their parent was terminated, Chromium leaves some behind.
 */
export class Helpers {
  #workers: Worker[] = [];
  /** Called when one has ended; the engine cannot go on then. */
  onLost: (error: StarlingError) => void = () => {};

  /** Starts so many; there are fewer if the runtime gives no more, and none for a module whose memory is its own. */
  static async start(module: WebAssembly.Module, memory: WebAssembly.Memory, wanted: number): Promise<Helpers> {
    const helpers = new Helpers();
    if (!importsMemory(module)) return helpers;
    const starts = Array.from({ length: wanted }, () => helpers.#start({ module, memory }));
    await Promise.allSettled(starts);
    return helpers;
  }

  #start(start: ThreadStart): Promise<void> {
    return new Promise((resolve, reject) => {
      // bundlers look for exactly this form
      const worker = startWorker(
        "thread.js",
        () => new Worker(new URL("./thread.js", import.meta.url), { type: "module" }),
      );
      const lost = (why: string) => {
        reject(new Error(why));
        if (this.#workers.includes(worker))
          this.onLost(new StarlingError("crashed", `Starling crashed: a thread ended: ${why}`));
      };
      worker.onerror = (event) => {
        event.preventDefault();
        lost(event.message ?? "its script cannot be loaded");
      };
      worker.onmessage = ({ data }: MessageEvent<FromThread>) => {
        if (data.type === "lost") return lost(data.why);
        this.#workers.push(worker);
        resolve();
      };
      worker.postMessage(start);
    });
  }

  /** How many there are. */
  get count(): number {
    return this.#workers.length;
  }
}
