// The worker: receives messages, calls its one {@link Core}, posts replies and events.

import { Core } from "./core.js";
import { toWire } from "./errors.js";
import type { FromWorker, ToWorker } from "./protocol.js";
import { parent } from "./runtime.js";

const abort = new AbortController();
let core: Core | undefined;

async function receive(message: ToWorker): Promise<void> {
  switch (message.type) {
    case "load":
      try {
        const emit = (events: (FromWorker & { type: "events" })["events"]) => post({ type: "events", events });
        core = await Core.load(message.options, (progress) => post({ type: "progress", progress }), abort.signal, emit);
        post({ type: "loaded", info: { ...core.info, worker: true } });
      } catch (e) {
        post({ type: "refused", error: toWire(e) });
      }
      break;
    case "abort":
      abort.abort();
      break;
    case "submit":
      core?.submit(message.job, message.request, message.constraint);
      break;
    case "cancel":
      core?.cancel(message.job);
      break;
    case "call":
      try {
        const method = core?.[message.method] as ((...args: unknown[]) => unknown) | undefined;
        post({ type: "reply", call: message.call, value: method?.apply(core, message.args) });
      } catch (e) {
        post({ type: "fault", call: message.call, error: toWire(e) });
      }
      break;
  }
}

const post = parent<ToWorker, FromWorker>((message) => void receive(message));
