// Reads receipts, verifies them with the model, and shows the tokens.

import { $, element } from "./dom.js";

export class Verifier {
  /** `model()` returns the loaded model. */
  constructor(model) {
    this.model = model;
    $("verify-form").onsubmit = (event) => {
      event.preventDefault();
      this.verify($("receipt").value);
    };
    $("receipt-file").onchange = () => this.take($("receipt-file").files[0]);
    /** Number of the last receipt: results of earlier ones are dropped. */
    this.turn = 0;
  }

  /** Reads a receipt from a file. */
  async take(file) {
    if (!file) return;
    $("receipt").value = await file.text();
    this.verify($("receipt").value);
  }

  async verify(text) {
    const turn = ++this.turn;
    const model = this.model();
    const say = (verdict, className) => Object.assign($("verdict"), { textContent: verdict, className });
    $("steps").replaceChildren();
    if (!model) return say("Load a model first.", "bad");
    say("Replaying the answer", "");
    try {
      const began = performance.now();
      const result = await model.verify(text);
      const ms = performance.now() - began;
      const { output } = JSON.parse(text);
      // tokens before the first difference
      const agreed = result.verified ? output.length : (result.step ?? 0);
      // the receipt of another model may have ids that this one lacks
      const said = (id) => model.detokenize([id]).catch(() => `[${id}]`);
      const texts = await Promise.all(output.slice(0, 4096).map(said));
      if (turn !== this.turn) return;
      const wrong = !result.verified && result.step !== null ? result.step : -1;
      $("steps").append(
        ...texts.map((t, i) => element("li", { className: i < agreed ? "ok" : i === wrong ? "wrong" : "" }, t)),
      );
      if (result.verified)
        say(
          `Verified: this model gave these ${result.tokens} tokens to this request, as replayed in ${ms.toFixed(0)} ms.`,
          "good",
        );
      else say(`Not verified: ${result.reason}.`, "bad");
    } catch (e) {
      if (turn === this.turn) say(`This cannot be checked: ${e.message}`, "bad");
    }
  }
}
