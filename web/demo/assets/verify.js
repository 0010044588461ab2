// Reads receipts, verifies them with the model, and shows the tokens.

import { $, element } from "./dom.js";

/** Tokens that are shown. */
const MAX_SHOWN = 4096;

export class Verifier {
  constructor(backend) {
    this.backend = backend;
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
    this.show(await file.text());
  }

  /** Shows a receipt and verifies it. */
  show(text) {
    $("receipt").value = text;
    this.verify(text);
  }

  async verify(text) {
    const turn = ++this.turn;
    const say = (verdict, className) => Object.assign($("verdict"), { textContent: verdict, className });
    $("steps").replaceChildren();
    if (!this.backend.model) return say("Load a model first.", "bad");
    say("Replaying the answer", "");
    try {
      const began = performance.now();
      const result = await this.backend.verify(text);
      const ms = performance.now() - began;
      const { output } = JSON.parse(text);
      // tokens before the first difference
      const agreed = result.verified ? output.length : (result.step ?? 0);
      const shown = output.slice(0, MAX_SHOWN);
      const texts = await this.backend.texts(shown).catch(() => shown.map((id) => `[${id}]`));
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
