// Colours of code: comments, strings, numbers and keywords of common languages, as nodes without HTML.

import { element } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const C_LIKE = words(
  "abstract as async await bool boolean break case catch char class const constexpr continue crate def default delete do double dyn else enum export extends extern false final finally float fn for from func function get if impl implements import in instanceof int interface internal is let long loop match mod module move mut namespace new nil null nullptr of package private protected pub public readonly ref return self set short signed sizeof static struct super switch template this throw throws trait true try type typedef typeof undefined union unsafe unsigned use using var virtual void volatile where while with yield",
);
const PYTHON = words(
  "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield",
);
const SHELL = words(
  "case do done echo elif else esac exit export fi for function if in local return set then until while",
);
const SQL = words(
  "select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order having limit as distinct null is in like between union all primary key references index with case when then else end",
);
const NONE = new Set();

const HASH = String.raw`#.*`;
const SLASHES = String.raw`\/\/.*|\/\*[\s\S]*?(?:\*\/|$)`;
const LANGUAGES = [
  [/^(py|python)$/, PYTHON, HASH],
  [/^(sh|bash|shell|zsh|console|dockerfile|make|makefile)$/, SHELL, HASH],
  [
    /^(ya?ml|toml|ini|rb|ruby|r|perl|elixir)$/,
    words("def end do if else elsif unless class module true false nil null return my sub use"),
    HASH,
  ],
  [/^sql$/, SQL, String.raw`--.*`, true],
  [
    /^(lua|haskell|hs)$/,
    words(
      "local function end if then else elseif for while do return nil true false module where let in data type import case of",
    ),
    String.raw`--.*`,
  ],
  [/^(html|xml|svg)$/, NONE, String.raw`<!--[\s\S]*?(?:-->|$)`],
  [/^(css|scss)$/, NONE, String.raw`\/\*[\s\S]*?(?:\*\/|$)`],
  [/^(json|jsonc)$/, words("true false null"), String.raw`\/\/.*`],
  [/^(text|txt|plain|markdown|md|diff)$/, undefined],
];
const STRING = String.raw`"""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|` + "`(?:\\\\.|[^`\\\\])*`?";
const NUMBER = String.raw`\b(?:0x[\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

/** Longer code stays plain. */
const MAX = 20_000;

/** The nodes of a code in a language. */
export function highlight(code, language = "") {
  const [, keywords, comment, ignoresCase] = LANGUAGES.find(([name]) => name.test(language.toLowerCase())) ?? [
    "",
    C_LIKE,
    SLASHES,
  ];
  if (!keywords || code.length > MAX) return [code];
  const pattern = new RegExp(`(${comment})|(${STRING})|(${NUMBER})|(${WORD})(\\s*\\()?`, "g");
  const nodes = [];
  let at = 0;
  const add = (className, text, from) => {
    if (from > at) nodes.push(code.slice(at, from));
    nodes.push(element("span", { className }, text));
    at = from + text.length;
  };
  for (const { index, 1: remark, 2: string, 3: number, 4: word, 5: isCalled } of code.matchAll(pattern)) {
    if (remark) add("c", remark, index);
    else if (string) add("s", string, index);
    else if (number) add("n", number, index);
    else if (keywords.has(ignoresCase ? word.toLowerCase() : word)) add("k", word, index);
    else if (isCalled) add("f", word, index);
  }
  nodes.push(code.slice(at));
  return nodes;
}
