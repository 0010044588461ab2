//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`, as data.
//!
//! Names and expressions are llama.cpp's (`llama-vocab.cpp`), except where it only approximates the expression of the
//! original `tokenizer.json`: then the original is used.

use super::class::{CharClass, bit};
use super::unicode::{
    DECIMAL, LOWER, MARK, MODIFIER, OTHER_LETTER, OTHER_NUMBER, PUNCTUATION, SYMBOL, TITLE, UPPER, WHITE,
};
use super::vocab::Spelling;
use super::words::{DigitGroups, PatternItem, SplitStep};

/// A pre-tokenizer, by the names that select it.
#[derive(Debug)]
pub(super) struct Pretokenizer {
    names: &'static [&'static str],
    pub(super) steps: &'static [SplitStep],
    /// Whether text is normalised to NFC before splitting, as `tokenizer.json` says.
    pub(super) nfc: bool,
    /// Spelling of the vocabularies. Byte spelling means byte-level BPE; otherwise characters are merged.
    pub(super) spelling: Spelling,
    /// Whether a word that is in the vocabulary is one token regardless of the merges.
    pub(super) ignore_merges: bool,
    /// Default of `add_bos_token`.
    pub(super) add_bos: bool,
    /// Default of `add_sep_token`: whether SEP separates two texts.
    pub(super) pair_sep: bool,
}

/// The pre-tokenizer with this name.
pub(super) fn find(name: &str) -> Option<&'static Pretokenizer> {
    PRETOKENIZERS.iter().find(|p| p.names.contains(&name))
}

/// All names, for error messages.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    PRETOKENIZERS.iter().flat_map(|p| p.names.iter().copied())
}

const fn row(names: &'static [&'static str], steps: &'static [SplitStep]) -> Pretokenizer {
    Pretokenizer {
        names,
        steps,
        nfc: false,
        spelling: Spelling::Bytes,
        ignore_merges: false,
        add_bos: false,
        pair_sep: false,
    }
}

/// The pre-tokenizer of vocabularies without one: the whole text is one word.
pub(super) static WHOLE: Pretokenizer = Pretokenizer { spelling: Spelling::Meta, ..row(&[], &[]) };

/// The same for vocabularies with escapes.
pub(super) static ESCAPED: Pretokenizer = Pretokenizer { spelling: Spelling::Escaped, ..row(&[], &[]) };

#[rustfmt::skip]
static PRETOKENIZERS: &[Pretokenizer] = &[
    row(&["default"], DEFAULT),
    Pretokenizer {
        ignore_merges: true,
        add_bos: true,
        ..row(
            &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
            LLAMA3,
        )
    },
    row(&["dbrx", "smaug-bpe", "chatglm-bpe"], LLAMA3),
    Pretokenizer { ignore_merges: true, ..row(&["glm4", "glm5"], LLAMA3) },
    Pretokenizer { ignore_merges: true, ..row(&["minicpm5"], MINICPM5) },
    Pretokenizer { nfc: true, ..row(&["qwen2", "f2llmv2"], QWEN2) },
    row(&["deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"], QWEN2),
    Pretokenizer { nfc: true, ..row(&["qwen35"], QWEN35) },
    row(&["ufakzeka"], UFAKZEKA),
    row(
        &[
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
            "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4",
        ],
        GPT2,
    ),
    Pretokenizer { pair_sep: true, ..row(&["jina-v1-en", "jina-v2-code", "roberta-bpe"], GPT2) },
    row(&["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"], STARCODER),
    row(&["jais-2"], JAIS2),
    row(&["deepseek-llm"], DEEPSEEK_LLM),
    row(&["deepseek-coder"], DEEPSEEK_CODER),
    row(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], DEEPSEEK_V3),
    row(&["spark2_5"], SPARK),
    Pretokenizer { ignore_merges: true, ..row(&["youtu"], YOUTU) },
    row(&["falcon"], FALCON),
    row(&["poro-chat", "bloom", "gpt3-finnish"], BLOOM),
    row(&["viking"], VIKING),
    Pretokenizer { ignore_merges: true, add_bos: true, ..row(&["tekken"], TEKKEN) },
    row(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], GPT4O),
    Pretokenizer { ignore_merges: true, ..row(&["granite-embed-multi-97m"], GPT4O) },
    row(&["tiny_aya", "cohere2moe"], TINY_AYA),
    row(&["kimi-k2"], KIMI_K2),
    row(&["superbpe"], SUPERBPE),
    row(&["bailingmoe", "bailingmoe2", "llada-moe"], BAILING),
    row(&["seed-coder"], SEED_CODER),
    row(&["afmoe"], AFMOE),
    row(&["laguna"], LAGUNA),
    row(&["exaone-moe"], EXAONE_MOE),
    Pretokenizer { add_bos: true, ..row(&["chameleon"], CHAMELEON) },
    Pretokenizer { spelling: Spelling::Meta, add_bos: true, ..row(&["gemma4", "granite-embed-multi-311m"], LINES_APART) },
    Pretokenizer { spelling: Spelling::Meta, ..row(&["sarvam-moe"], LINES_APART) },
    Pretokenizer { spelling: Spelling::Plain, ..row(&["whitespace"], NOT_BLANKS) },
];

const LETTER: u32 = 1 << UPPER | 1 << LOWER | 1 << TITLE | 1 << MODIFIER | 1 << OTHER_LETTER;
const NUMBER: u32 = 1 << DECIMAL | 1 << OTHER_NUMBER;
const MARKS: u32 = 1 << MARK;
const BLANK: u32 = 1 << WHITE;
const PUNCT: u32 = 1 << PUNCTUATION;

const L: CharClass = CharClass::any(LETTER);
const L_OR_M: CharClass = CharClass::any(LETTER | MARKS);
const N: CharClass = CharClass::any(NUMBER);
const P: CharClass = CharClass::any(PUNCT);
const P_OR_S: CharClass = CharClass::any(PUNCT | 1 << SYMBOL);
const SPACE: CharClass = CharClass::any(bit::SPACE);
const S: CharClass = CharClass::any(BLANK);
const NEWLINE: CharClass = CharClass::any(bit::NEWLINE);
const NEWLINE_OR_SLASH: CharClass = CharClass::any(bit::NEWLINE | bit::SLASH);
const ALPHA: CharClass = CharClass::any(bit::ALPHA);
/// `[^\s\p{L}\p{N}]`
const OTHER: CharClass = CharClass::none(BLANK | LETTER | NUMBER);
/// `[^\r\n\p{L}\p{N}]`, which may precede a word
const LEAD: CharClass = CharClass::none(bit::NEWLINE | LETTER | NUMBER);
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
const BIG: CharClass = CharClass::any((LETTER & !(1 << LOWER)) | MARKS);
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
const SMALL: CharClass = CharClass::any((LETTER & !(1 << UPPER | 1 << TITLE)) | MARKS);

const fn run(class: CharClass, min: u32, max: u32) -> PatternItem {
    PatternItem::Run { class, min, max }
}
const fn one(class: CharClass) -> PatternItem {
    run(class, 1, 1)
}
const fn opt(class: CharClass) -> PatternItem {
    run(class, 0, 1)
}
const fn star(class: CharClass) -> PatternItem {
    run(class, 0, u32::MAX)
}
const fn plus(class: CharClass) -> PatternItem {
    run(class, 1, u32::MAX)
}
const fn ranges(with: &'static [(char, char)]) -> CharClass {
    CharClass { with, ..CharClass::any(0) }
}

// alternatives that many expressions share
const LINES: &[PatternItem] = &[PatternItem::Lines];
const BLANKS_BEFORE_BLANK: &[PatternItem] = &[plus(S), PatternItem::NotBeforeText];
const BLANKS: &[PatternItem] = &[plus(S)];
const WORD: &[PatternItem] = &[opt(LEAD), plus(L)];
const OTHERS: &[PatternItem] = &[opt(SPACE), plus(OTHER), star(NEWLINE)];
const OTHERS_OR_SLASHES: &[PatternItem] = &[opt(SPACE), plus(OTHER), star(NEWLINE_OR_SLASH)];

const GPT2_MATCH: SplitStep = SplitStep::Matches(&[
    &[PatternItem::LowerContraction],
    &[opt(SPACE), plus(L)],
    &[opt(SPACE), plus(N)],
    &[opt(SPACE), plus(OTHER)],
    BLANKS_BEFORE_BLANK,
    BLANKS,
]);
static GPT2: &[SplitStep] = &[GPT2_MATCH];
static STARCODER: &[SplitStep] = &[SplitStep::Matches(&[&[one(N)]]), GPT2_MATCH];

static LLAMA3: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    WORD,
    &[run(N, 1, 3)],
    OTHERS,
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
static MINICPM5: &[SplitStep] = &[
    SplitStep::Matches(&[&[run(N, 1, 3)]]),
    SplitStep::Matches(&[&[PatternItem::Contraction], WORD, &[plus(N)], OTHERS, LINES, BLANKS_BEFORE_BLANK, BLANKS]),
];
const QWEN2_MATCH: SplitStep =
    SplitStep::Matches(&[&[PatternItem::Contraction], WORD, &[one(N)], OTHERS, LINES, BLANKS_BEFORE_BLANK, BLANKS]);
static QWEN2: &[SplitStep] = &[QWEN2_MATCH];
static QWEN35: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    &[opt(LEAD), plus(L_OR_M)],
    &[one(N)],
    &[opt(SPACE), plus(CharClass::none(BLANK | LETTER | MARKS | NUMBER)), star(NEWLINE)],
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
static UFAKZEKA: &[SplitStep] = &[SplitStep::Matches(&[WORD, &[one(N)], OTHERS, LINES, BLANKS_BEFORE_BLANK, BLANKS])];
const LINES_APART_MATCH: SplitStep =
    SplitStep::Matches(&[&[plus(CharClass::none(bit::LINE_FEED))], &[plus(CharClass::any(bit::LINE_FEED))]]);
static LINES_APART: &[SplitStep] = &[LINES_APART_MATCH];
static LAGUNA: &[SplitStep] = &[LINES_APART_MATCH, QWEN2_MATCH];
static NOT_BLANKS: &[SplitStep] = &[SplitStep::Matches(&[&[plus(CharClass::none(BLANK))]])];
static BAILING: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    WORD,
    &[one(N)],
    OTHERS,
    &[star(S), one(NEWLINE)],
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
static SEED_CODER: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    WORD,
    &[one(N)],
    &[opt(SPACE), plus(OTHER)],
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
static EXAONE_MOE: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    &[opt(LEAD), PatternItem::SpacedLetters],
    &[one(N)],
    &[opt(SPACE), plus(OTHER), opt(NEWLINE_OR_SLASH)],
    &[star(S), one(NEWLINE)],
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
static JAIS2: &[SplitStep] = &[SplitStep::Matches(&[
    &[PatternItem::Contraction],
    WORD,
    &[run(N, 1, 3)],
    OTHERS,
    LINES,
    &[run(S, 512, 512), PatternItem::NotBeforeText],
    &[run(S, 256, 256), PatternItem::NotBeforeText],
    &[run(S, 128, 128), PatternItem::NotBeforeText],
    &[run(S, 64, 64), PatternItem::NotBeforeText],
    &[run(S, 32, 32), PatternItem::NotBeforeText],
    &[run(S, 16, 16), PatternItem::NotBeforeText],
    &[run(S, 8, 8), PatternItem::NotBeforeText],
    &[run(S, 4, 4), PatternItem::NotBeforeText],
    &[run(S, 1, 2), PatternItem::NotBeforeText],
    &[one(S)],
])];

static TEKKEN: &[SplitStep] = &[SplitStep::Matches(&[
    &[opt(LEAD), star(BIG), plus(SMALL)],
    &[opt(LEAD), plus(BIG), star(SMALL)],
    &[one(N)],
    OTHERS_OR_SLASHES,
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];
const GPT4O_MATCH: SplitStep = SplitStep::Matches(&[
    &[opt(LEAD), star(BIG), plus(SMALL), PatternItem::MaybeContraction],
    &[opt(LEAD), plus(BIG), star(SMALL), PatternItem::MaybeContraction],
    &[run(N, 1, 3)],
    OTHERS_OR_SLASHES,
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
]);
static GPT4O: &[SplitStep] = &[GPT4O_MATCH];
static TINY_AYA: &[SplitStep] = &[SplitStep::DigitGroups(DigitGroups::BeforeBoundary), GPT4O_MATCH];
#[rustfmt::skip]
static YOUTU: &[SplitStep] = &[
    SplitStep::Matches(&[
        &[plus(ranges(&[('가', '힣'), ('ㄱ', 'ㆎ')]))],
        &[plus(CharClass {
            with: &[
                ('！', '！'), ('…', '…'), ('“', '”'), ('‘', '’'), ('—', '—'), ('：', '：'), ('；', '；'), ('，', '，'),
                ('、', '〿'), ('︰', '﹏'),
            ],
            ..CharClass::any(0)
        })],
        &[plus(ranges(&[('ㄅ', 'ㄯ')]))],
        &[plus(CJK_AND_KANA)],
    ]),
    SplitStep::Matches(&[
        &[opt(LEAD), star(BIG), plus(SMALL), PatternItem::MaybeContraction],
        &[opt(LEAD), plus(BIG), star(SMALL), PatternItem::MaybeContraction],
        &[one(N)],
        OTHERS_OR_SLASHES,
        LINES,
        BLANKS_BEFORE_BLANK,
        BLANKS,
    ]),
];

#[rustfmt::skip]
const HAN: &[(char, char)] = &[
    ('\u{2e80}', '\u{2e99}'), ('\u{2e9b}', '\u{2ef3}'), ('\u{2f00}', '\u{2fd5}'), ('\u{3005}', '\u{3005}'),
    ('\u{3007}', '\u{3007}'), ('\u{3021}', '\u{3029}'), ('\u{3038}', '\u{303b}'), ('\u{3400}', '\u{4dbf}'),
    ('\u{4e00}', '\u{9fff}'), ('\u{f900}', '\u{fa6d}'), ('\u{fa70}', '\u{fad9}'), ('\u{16fe2}', '\u{16fe3}'),
    ('\u{16ff0}', '\u{16ff1}'), ('\u{20000}', '\u{2a6df}'), ('\u{2a700}', '\u{2b739}'), ('\u{2b740}', '\u{2b81d}'),
    ('\u{2b820}', '\u{2cea1}'), ('\u{2ceb0}', '\u{2ebe0}'), ('\u{2ebf0}', '\u{2ee5d}'), ('\u{2f800}', '\u{2fa1d}'),
    ('\u{30000}', '\u{3134a}'), ('\u{31350}', '\u{323af}'),
];
const BIG_NOT_HAN: CharClass = CharClass { without: HAN, ..BIG };
const SMALL_NOT_HAN: CharClass = CharClass { without: HAN, ..SMALL };
static KIMI_K2: &[SplitStep] = &[SplitStep::Matches(&[
    &[plus(ranges(HAN))],
    &[opt(LEAD), star(BIG_NOT_HAN), plus(SMALL_NOT_HAN), PatternItem::MaybeContraction],
    &[opt(LEAD), plus(BIG_NOT_HAN), star(SMALL_NOT_HAN), PatternItem::MaybeContraction],
    &[run(N, 1, 3)],
    OTHERS,
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
])];

const CJK_AND_KANA: CharClass = ranges(&[('一', '龥'), ('\u{3040}', 'ゟ'), ('゠', 'ヿ')]);
/// `[^\r\n\p{L}\p{P}\p{S}]`
const LEAD_NOT_MARKED: CharClass = CharClass::none(bit::NEWLINE | LETTER | PUNCT | 1 << SYMBOL);
const DEEPSEEK_V3_MATCH: SplitStep = SplitStep::Matches(&[
    &[one(CharClass::any(bit::ASCII_PUNCT)), plus(ALPHA)],
    &[opt(LEAD_NOT_MARKED), plus(L_OR_M)],
    &[opt(SPACE), plus(P_OR_S), star(NEWLINE)],
    LINES,
    BLANKS_BEFORE_BLANK,
    BLANKS,
]);
static DEEPSEEK_V3: &[SplitStep] =
    &[SplitStep::Matches(&[&[run(N, 1, 3)]]), SplitStep::Matches(&[&[plus(CJK_AND_KANA)]]), DEEPSEEK_V3_MATCH];
static SPARK: &[SplitStep] = &[
    SplitStep::Matches(&[&[run(N, 1, 3)]]),
    SplitStep::Matches(&[&[plus(CJK_AND_KANA)]]),
    SplitStep::Matches(&[
        &[one(CharClass::any(bit::ASCII_PUNCT)), plus(ALPHA)],
        &[opt(LEAD_NOT_MARKED), plus(L_OR_M)],
        &[opt(SPACE), plus(P_OR_S)],
        &[one(NEWLINE)],
        BLANKS_BEFORE_BLANK,
        BLANKS,
    ]),
    SplitStep::Matches(&[&[one(N)]]),
];
#[rustfmt::skip]
static AFMOE: &[SplitStep] = &[
    SplitStep::DigitGroups(DigitGroups::Isolated),
    SplitStep::Matches(&[&[plus(ranges(&[
        ('一', '\u{9fff}'), ('㐀', '\u{4dbf}'), ('\u{f900}', '\u{faff}'), ('\u{3040}', 'ゟ'), ('゠', 'ヿ'),
        ('\u{ff65}', '\u{ff9f}'), ('\u{2f00}', '\u{2fdf}'), ('\u{e40}', '\u{e7f}'), ('\u{e80}', '\u{eff}'),
        ('\u{1780}', '\u{17ff}'), ('\u{1000}', '\u{109f}'), ('\u{aa60}', '\u{aa7f}'), ('\u{a9e0}', '\u{a9ff}'),
        ('\u{ac00}', '\u{d7af}'), ('\u{1100}', '\u{11ff}'),
    ]))]]),
    DEEPSEEK_V3_MATCH,
];

const DEEPSEEK_CJK: SplitStep =
    SplitStep::Matches(&[&[plus(ranges(&[('一', '龥'), ('\u{800}', '一'), ('가', '\u{d7ff}')]))]]);
static DEEPSEEK_CODER: &[SplitStep] = &[
    SplitStep::Matches(&[&[one(NEWLINE)]]),
    SplitStep::Matches(&[&[opt(S), plus(L)]]),
    SplitStep::Matches(&[&[opt(S), plus(P)]]),
    DEEPSEEK_CJK,
    SplitStep::Matches(&[&[one(N)]]),
];
/// Letters of scripts with upper and lower case, as listed in the original expression.
#[rustfmt::skip]
const CASED: CharClass = CharClass {
    with: &[
        ('µ', 'µ'), ('À', 'Ö'), ('Ø', 'ö'), ('ø', 'ƺ'), ('Ƽ', 'ƿ'), ('Ǆ', 'ʓ'), ('ʕ', 'ʯ'), ('Ͱ', 'ͳ'), ('Ͷ', 'ͷ'),
        ('ͻ', 'ͽ'), ('Ϳ', 'Ϳ'), ('Ά', 'Ά'), ('Έ', 'Ί'), ('Ό', 'Ό'), ('Ύ', 'Ρ'), ('Σ', 'ϵ'), ('Ϸ', 'ҁ'), ('Ҋ', 'ԯ'),
        ('Ա', 'Ֆ'), ('Ⴀ', 'Ⴥ'), ('Ꭰ', 'Ᏽ'), ('ᏸ', 'ᏽ'), ('Ა', 'Ჺ'), ('Ჽ', 'Ჿ'), ('ᴀ', 'ᴫ'), ('ᵫ', 'ᵷ'), ('ᵹ', 'ᶚ'),
        ('Ḁ', 'ἕ'), ('Ἐ', 'Ἕ'), ('ἠ', 'ὅ'), ('Ὀ', 'Ὅ'), ('ὐ', 'ὗ'), ('Ὑ', 'Ὑ'), ('Ὓ', 'Ὓ'), ('Ὕ', 'Ὕ'),
        ('Ὗ', '\u{1f7d}'), ('ᾀ', 'ᾴ'), ('ᾶ', 'ᾼ'), ('\u{1fbe}', '\u{1fbe}'), ('ῂ', 'ῄ'), ('ῆ', 'ῌ'),
        ('ῐ', '\u{1fd3}'), ('ῖ', '\u{1fdb}'), ('ῠ', 'Ῥ'), ('ῲ', 'ῴ'), ('ῶ', 'ῼ'), ('ℂ', 'ℂ'), ('ℇ', 'ℇ'), ('ℊ', 'ℓ'),
        ('ℕ', 'ℕ'), ('ℙ', 'ℝ'), ('ℤ', 'ℤ'), ('\u{2126}', '\u{2126}'), ('ℨ', 'ℨ'), ('\u{212a}', 'ℭ'), ('ℯ', 'ℴ'),
        ('ℹ', 'ℹ'), ('ℼ', 'ℿ'), ('ⅅ', 'ⅉ'), ('ⅎ', 'ⅎ'), ('Ↄ', 'ↄ'), ('Ⰰ', 'ⱻ'), ('Ȿ', 'ⳤ'), ('Ⳬ', 'ⳮ'), ('Ⳳ', 'ⳳ'),
        ('Ꙁ', 'ꙭ'), ('Ꚁ', 'ꚛ'), ('Ꜣ', 'ꝯ'), ('ꝱ', 'ꞇ'), ('Ꞌ', 'ꞎ'), ('ꭰ', 'ꮿ'), ('ﬀ', 'ﬆ'), ('ﬓ', 'ﬗ'), ('Ａ', 'Ｚ'),
        ('ａ', 'ｚ'), ('𐐀', '𐑏'), ('𐒰', '𐓓'), ('𐓘', '𐓻'), ('𐲀', '𐲲'), ('𐳀', '𐳲'), ('𑢠', '𑣟'), ('𞤀', '𞥃'),
    ],
    ..ALPHA
};
/// The second class contains the letters too, because the original expression has the range `:-~`.
static DEEPSEEK_LLM: &[SplitStep] = &[
    SplitStep::Matches(&[&[one(NEWLINE)]]),
    SplitStep::Matches(&[&[opt(S), plus(CASED)]]),
    SplitStep::Matches(&[&[
        opt(S),
        plus(CharClass {
            with: &[('！', '／'), ('：', '～'), ('‘', '‟'), ('\u{3000}', '。')],
            ..CharClass::any(bit::ASCII_PUNCT | bit::ALPHA)
        }),
    ]]),
    SplitStep::TrailingWhitespace,
    DEEPSEEK_CJK,
    SplitStep::Matches(&[&[plus(N)]]),
];

const THREE_DIGITS: SplitStep = SplitStep::Matches(&[&[run(CharClass::any(bit::DIGIT), 3, 3)]]);
static DEFAULT: &[SplitStep] = &[
    SplitStep::Matches(&[&[plus(CharClass::any(PUNCT | bit::MATHS))]]),
    GPT2_MATCH,
    SplitStep::Matches(&[&[plus(N)]]),
    THREE_DIGITS,
];
static FALCON: &[SplitStep] =
    &[SplitStep::Matches(&[&[plus(CharClass::any(PUNCT | bit::MATHS | bit::BACKTICK))]]), GPT2_MATCH, THREE_DIGITS];
static SUPERBPE: &[SplitStep] = &[SplitStep::Matches(&[&[plus(N)]]), SplitStep::DigitGroups(DigitGroups::Between)];
/// `[^(\s|.,!?…。，、।۔،)]`
#[rustfmt::skip]
const CLAUSE: CharClass = CharClass {
    with: &[('…', '…'), ('。', '。'), ('，', '，'), ('、', '、'), ('।', '।'), ('۔', '۔'), ('،', '،')],
    ..CharClass::none(BLANK | bit::STOP)
};
const BLOOM_MATCH: SplitStep = SplitStep::Matches(&[&[opt(SPACE), plus(CLAUSE)]]);
static BLOOM: &[SplitStep] = &[BLOOM_MATCH];
static VIKING: &[SplitStep] = &[BLOOM_MATCH, SplitStep::Matches(&[&[one(N)]])];
static CHAMELEON: &[SplitStep] = &[
    SplitStep::Matches(&[&[one(CharClass::any(bit::TAB | bit::LINE_FEED))], &[run(SPACE, 4, 4)], &[run(SPACE, 2, 2)]]),
    SplitStep::Matches(&[&[one(N)]]),
    SplitStep::Matches(&[&[one(CharClass::any(PUNCT | bit::ASCII_PUNCT))]]),
    GPT2_MATCH,
];
