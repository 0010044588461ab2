// The error class, with a `code` for programs.

/**
 * The kind of failure:
 *
 * - `model`: the file is not GGUF, is truncated, or has an unsupported architecture or type
 * - `request`: a prompt or an option is wrong
 * - `template`: the chat template is wrong, or refuses the conversation
 * - `capacity`: no room for the request
 * - `memory`: not enough memory, of which a module has at most 4 GiB, or 16 GiB with memory64
 * - `network`: the download failed, also after retries
 * - `checksum`: the file has another digest, or changed while it was downloaded
 * - `quota`: the browser's storage has no room for the cached file
 * - `unsupported`: the runtime lacks something
 * - `crashed`: a fault in Starling; this model is unusable, a new one can be loaded
 * - `disposed`: the model was disposed
 */
export type ErrorCode =
  | "model"
  | "request"
  | "template"
  | "capacity"
  | "memory"
  | "network"
  | "checksum"
  | "quota"
  | "unsupported"
  | "crashed"
  | "disposed";

/** An error of Starling. An aborted call throws the reason of its signal instead. */
export class StarlingError extends Error {
  override readonly name = "StarlingError";
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
  }
}

/** An error as posted by a worker. */
export interface WireError {
  name: string;
  message: string;
  code?: ErrorCode | undefined;
  cause?: WireError | undefined;
}

export function toWire(e: unknown): WireError {
  if (!(e instanceof Error)) return { name: "Error", message: String(e) };
  return {
    name: e.name,
    message: e.message,
    ...(e instanceof StarlingError && { code: e.code }),
    ...(e.cause !== undefined && { cause: toWire(e.cause) }),
  };
}

export function fromWire(e: WireError): Error {
  const options = e.cause && { cause: fromWire(e.cause) };
  if (e.code) return new StarlingError(e.code, e.message, options);
  return e.name === "AbortError"
    ? new DOMException(e.message, e.name)
    : Object.assign(new Error(e.message, options), { name: e.name });
}
