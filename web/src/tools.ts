/** A call of a tool. */
export interface ToolCall {
  /** Position among the calls of the answer. */
  index: number;
  /** ID of the call, for `tool_call_id` in the message with its result. */
  id: string;
  type: "function";
  /** The function to call; arguments are JSON text. */
  function: { name: string; arguments: string };
}
