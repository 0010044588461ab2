// One class of errors, told apart by `code`.

/**
 * What kind of failure an error is:
 *
 * - `model`: the file is no GGUF, cut short, or of a kind that Starling does not know
 * - `request`: a prompt or an option is wrong
 * - `template`: the chat template is wrong, or refuses the conversation
 * - `capacity`: no room for the request
 * - `memory`: not enough memory, of which a module has at most 4 GiB
 * - `network`: the download failed, and went on failing when tried again
 * - `checksum`: the file is not the one that was asked for
 * - `quota`: no room in the browser's storage for the cached file
 * - `unsupported`: the runtime lacks something
 * - `crashed`: a fault in Starling; this model can no longer be used, a new one can be loaded
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
  /** What kind of failure this is. */
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
  }
}

/** An error as it crosses from a worker. */
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
