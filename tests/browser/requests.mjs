// Random requests with random options, the same every time.

// mulberry32
let state = 20260;
const random = () => {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
};
const pick = (list) => list[Math.floor(random() * list.length)];

const prompts = [
  "Once upon a time",
  "The fox",
  "Zoë said: \u201cno\u201d.",
  "One cold day, the little bird",
  "\n\n",
  "A 12 b",
  'Tim said: "no". Sue said: "no".\nTim said: "yes". Sue said: ',
];

// as the package, the command and the server call it
const stages = [
  ["temperature", "--temp", "temperature", [0, 0.5, 1, 1.75]],
  ["topK", "--top-k", "top_k", [0, 1, 5, 100]],
  ["topP", "--top-p", "top_p", [0.25, 0.5, 1]],
  ["minP", "--min-p", "min_p", [0, 0.125, 0.5]],
  ["typicalP", "--typical", "typical_p", [0.25, 0.75, 1]],
  ["repeatPenalty", "--repeat-penalty", "repeat_penalty", [1, 1.25, 2]],
  ["frequencyPenalty", "--frequency-penalty", "frequency_penalty", [-0.5, 0, 1.5]],
  ["presencePenalty", "--presence-penalty", "presence_penalty", [0, 0.75]],
  ["stop", "--stop", "stop", [" the", ".", "said"]],
];
/** What a request to the server has that does not say otherwise. */
const SERVER = { temperature: 1, topK: 0, topP: 1, minP: 0, typicalP: 1, repeatLastN: -1 };

/** A request: `options` for the package, `args` for the command, `body` for the server. */
export function request() {
  const [prompt, seed, maxTokens] = [pick(prompts), Math.floor(random() * 2 ** 48), 1 + Math.floor(random() * 40)];
  const options = { seed, maxTokens };
  const args = [prompt, `--seed=${seed}`, `-n${maxTokens}`];
  const body = { prompt, seed, max_tokens: maxTokens };
  for (const [name, flag, key, values] of stages) {
    if (random() < 0.5) continue;
    options[name] = body[key] = pick(values);
    args.push(`${flag}=${options[name]}`);
  }
  if (random() < 0.3) {
    options.logitBias = body.logit_bias = { 262: 3.5, 17: -2 };
    args.push("--logit-bias=262=3.5", "--logit-bias=17=-2");
  }
  if (random() < 0.3) {
    options.dry = { multiplier: 2, base: 1.5, allowedLength: 1 };
    Object.assign(body, { dry_multiplier: 2, dry_base: 1.5, dry_allowed_length: 1 });
    args.push("--dry-multiplier=2", "--dry-base=1.5", "--dry-allowed-length=1");
    if (random() < 0.5) {
      options.dry.breakers = body.dry_sequence_breakers = ["no", ". "];
      args.push("--dry-sequence-breaker=no", "--dry-sequence-breaker=. ");
    }
  }
  return { prompt, options, args, body };
}

/** The options of a request with the server's defaults. */
export const asTheServer = (options) => ({ ...SERVER, ...options });

/** What the command has that the server has not. */
export function more({ prompt, options, args }) {
  const [all, flags] = [{ ...options }, [...args]];
  if (random() < 0.5) {
    all.repeatLastN = pick([0, 8, -1]);
    flags.push(`--repeat-last-n=${all.repeatLastN}`);
  }
  return { prompt, options: all, args: flags };
}
