#!/usr/bin/env python3
"""Write fixtures/tokenizer/pretokenizer.json: texts split by Hugging Face tokenizers, for each pre-tokenizer.

    pip install tokenizers==0.23.3
    python3 tests/scripts/make_pretokenizer_cases.py > fixtures/tokenizer/pretokenizer.json

The regular expressions are from the published tokenizer.json files, as quoted in llama.cpp's llama-vocab.cpp.
"""

import json
import random

from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BIG, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTION + r"|" + LEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
GPT4O = (LEAD + BIG + "*" + SMALL + "+" + CONTRACTION + "?|" + LEAD + BIG + "+" + SMALL + "*" + CONTRACTION
         + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + BLANKS)
DEEPSEEK3 = (ASCII_PUNCT + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + BLANKS)
BIG_NOT_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SMALL_NOT_HAN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
JAIS_BLANKS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"

PATTERNS = {
    "gpt-2": [GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "llama-bpe": [QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")],
    "qwen2": [QWEN2],
    "qwen35": [CONTRACTION + r"|" + LEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + BLANKS],
    "ufakzeka": [QWEN2.removeprefix(CONTRACTION + "|")],
    "minicpm5": [r"\p{N}{1,3}", QWEN2.replace(r"\p{N}|", r"\p{N}+|")],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "seed-coder": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + BLANKS],
    "bailingmoe": [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                   r"|\s+(?!\S)|\s+"],
    "exaone-moe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+"
                   r"[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"],
    "jais-2": [CONTRACTION + r"|" + LEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + JAIS_BLANKS],
    "tekken": [LEAD + BIG + "*" + SMALL + "+|" + LEAD + BIG + "+" + SMALL + r"*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
               + BLANKS],
    "gpt-4o": [GPT4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "youtu": ["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
              GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")],
    "kimi-k2": ["|".join([r"[\p{Han}]+", LEAD + BIG_NOT_HAN + "*" + SMALL_NOT_HAN + "+" + CONTRACTION + "?",
                          LEAD + BIG_NOT_HAN + "+" + SMALL_NOT_HAN + "*" + CONTRACTION + "?", r"\p{N}{1,3}",
                          r" ?[^\s\p{L}\p{N}]+[\r\n]*", BLANKS])],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
    "spark2_5": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                 ASCII_PUNCT + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
                 r"\p{N}"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-" "\u1f7d" r"ᾀ-ᾴᾶ-ᾼ"
        "\u1fbe" r"ῂ-ῄῆ-ῌῐ-" "\u1fd3" r"ῖ-" "\u1fdb" r"ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ" "\u2126" r"ℨ" "\u212a" r"-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
        r"ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "gemma4": [r"[^\n]+|[\n]+"],
    "whitespace": [r"\S+"],
    "chameleon": [r"([\t\n]|    |  )", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2],
}

TEXTS = [
    "Hello, world! It's 2024, isn't it? I'LL say WE'VE'd they'Re o'clock 'tis 'S'",
    "  leading, double  spaces\tand\t\ttabs \n newline \r\n\r\n  trailing   ",
    "1 12 123 1234 12345 1234567 x1234y 3.14159 1,000,000 ½ ² ٣٤٥٦ १२३४ Ⅷ 12٣4 0x1F 1234_5 7e10",
    "don't DON'T DoN'ſ we're'S '' 'a ''s x'y'z l'été aujourd'hui",
    "camelCaseHTTPServer XMLHttpRequest ABC abC aBC ǅungla İstanbul STRAẞE ﬁne",
    "你好，世界！今天是2024年5月1日。「引用」、…——《書》",
    "こんにちは、カタカナ ﾊﾝｶｸ ー々〆 안녕하세요 세계 ㄱㄴ ㄅㄆ",
    "Привет, мир! Ελληνικά: ά ὀ ᾳ. עִבְרִית الْعَرَبِيَّة، نص। हिन्दी में नमस्ते। ไทย ภาษา",
    "e\u0301 a\u0300b \u0301x n\u0303 \u200d\u200b\u00a0\u2003\u3000y \u0085z \ufeffq",
    "😀👍🏽👨\u200d👩\u200d👧 🇩🇪 ™©® €$+<=>^~|` a+b=c <|im_end|> `code`",
    "#include <stdio.h>\nint main(void) {\n    printf(\"%d\\n\", 42);\n\treturn 0; // done\n}\n\n\n",
    "http://example.com/a/b?c=d&e=f#g /usr//bin/\n// x/\r\n@user #tag $5.00 50% a_b __init__ a-b -- --- ...",
    " a  b   c    d     e" + " " * 9 + "f" + " " * 21 + "g" + " " * 70,
    "(a|b). [c], {d}! ¿qué? ¡sí! a.b,c!d?e…f。g，h、i।j۔k،l",
    "\n", " ", "", "\r\n", "a", "\t a", " \n \n a", "x \n", "\u3000\n\u3000x", "a\u0301\u0301", "१\u0941",
]


def random_text(rng: random.Random) -> str:
    parts = ["a", "Bc", "DE", "ǅ", "ʰ", "漢", "か", "한", "\u0301", "\u0941", "1", "23", "٣", "²", " ", "  ", "\n", "\r",
             "\t", "\u00a0", "'s", "'LL", "'", ".", "!?", "+", "$", "/", "_", "😀", "\u200d", "é", "ß", "ж", "…", "。"]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(3, 24)))


def main() -> None:
    rng = random.Random(7)
    texts = TEXTS + [random_text(rng) for _ in range(60)]
    cases = {}
    for name, patterns in PATTERNS.items():
        split = Sequence([Split(Regex(pattern), "isolated") for pattern in patterns])
        # word lengths in characters
        cases[name] = [[len(word) for word, _ in split.pre_tokenize_str(text)] for text in texts]
    print(json.dumps({"texts": texts, "word_lengths": cases}, ensure_ascii=False, separators=(",", ":")))


main()
