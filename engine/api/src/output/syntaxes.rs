//! The table of the syntaxes in which models write tool calls and reasoning; [`super::detect`] chooses one for a model.

/// How a model writes tool calls.
#[derive(Debug, PartialEq, Eq)]
pub struct CallSyntax {
    /// Name in settings and requests.
    pub name: &'static str,
    /// Texts that all occur in a prompt of this syntax that describes tools; without any, the syntax is only used if it is named.
    pub template: &'static [&'static str],
    /// Markers, each of which begins a call or a list of calls.
    pub open: &'static [&'static str],
    /// Other markers beside calls. They are no content next to a call.
    pub around: &'static [&'static str],
    /// What follows the opening marker.
    pub body: Body,
    /// IDs of the calls.
    pub ids: CallIdSyntax,
    /// Where calls begin besides at a marker.
    pub start: Start,
}

/// What follows the opening marker of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// `{"name": …, "arguments": {…}}`, or a list of such objects.
    Json,
    /// `{"f": {…}}`, or a list of such objects.
    Keyed,
    /// A name, then the arguments as a JSON object.
    Named {
        /// Text before the name, if any.
        prefix: &'static str,
        /// Text between name and arguments; the shortest name ends at one of them.
        end: &'static [&'static str],
    },
    /// A name, then parameters between tags.
    Tags(&'static Tags),
    /// `f(a=1, b='x')`, or a list of such calls.
    Python,
    /// `call:f{a:1,b:"x"}` with strings between the text `quote`.
    Pairs {
        /// Before and after a string.
        quote: &'static str,
    },
    /// Messages with a header that says their channel and recipient.
    Harmony,
}

/// Texts around the parts of a call with parameters between tags.
#[derive(Debug, PartialEq, Eq)]
pub struct Tags {
    /// After the name; if empty, the name ends at white space or `<`.
    pub name_end: &'static str,
    /// Before a parameter's name.
    pub key: &'static str,
    /// Between a parameter's name and its value.
    pub key_end: &'static str,
    /// Before the value.
    pub value: &'static str,
    /// After the value.
    pub value_end: &'static str,
    /// After the parameters.
    pub end: &'static str,
    /// Whether a line break on either side of a value is layout. If not, values are verbatim.
    pub has_layout: bool,
}

/// IDs of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallIdSyntax {
    /// `call_` and 32 hexadecimal digits.
    Hex,
    /// Nine letters and digits, which Mistral's templates demand.
    Nine,
    /// `functions.NAME:INDEX`, which Kimi's templates print.
    Named,
}

/// Where calls begin besides at a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nowhere.
    Marker,
    /// At the start of the answer too, if the function is one of the request's tools.
    Bare,
    /// The generation prompt ends with the opening marker; the name `all` is that of content.
    Prompt,
    /// At a marker, if the function is one of the request's tools.
    Known,
    /// At a marker, within the reasoning too, which ends there.
    Anywhere,
}

const QWEN: Tags = Tags {
    name_end: ">",
    key: "<parameter=",
    key_end: ">",
    value: "",
    value_end: "</parameter>",
    end: "</function>",
    has_layout: true,
};
const SEED: Tags = Tags { has_layout: false, ..QWEN };
const GLM: Tags = Tags {
    name_end: "",
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
    end: "</tool_call>",
    has_layout: false,
};
const MINIMAX: Tags = Tags {
    name_end: "\">",
    key: "<parameter name=\"",
    key_end: "\">",
    value: "",
    value_end: "</parameter>",
    end: "</invoke>",
    has_layout: false,
};
const DSML: Tags = Tags {
    name_end: "\">",
    key: "<｜DSML｜parameter name=\"",
    key_end: "\">",
    value: "",
    value_end: "</｜DSML｜parameter>",
    end: "</｜DSML｜invoke>",
    has_layout: false,
};

macro_rules! syntaxes {
    ($($name:literal $template:tt $open:tt $around:tt $body:expr, $ids:ident, $start:ident;)*) => {
        /// All syntaxes, special ones before those that they are like.
        pub static CALL_SYNTAXES: &[CallSyntax] = &[$(CallSyntax {
            name: $name, template: &$template, open: &$open, around: &$around, body: $body, ids: CallIdSyntax::$ids,
            start: Start::$start,
        },)*];
    };
}

syntaxes! {
    "harmony" ["<|channel|>", "<|message|>"] [] [] Body::Harmony, Hex, Marker;
    "gemma4" ["<|tool_call>"] ["<|tool_call>"] ["<tool_call|>"] Body::Pairs { quote: "<|\"|>" }, Hex, Marker;
    "functiongemma" ["<start_function_call>"] ["<start_function_call>"] ["<end_function_call>"]
        Body::Pairs { quote: "<escape>" }, Hex, Marker;
    "kimi-k2" ["<|tool_call_begin|>"] ["<|tool_call_begin|>"]
        ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"]
        Body::Named { prefix: "functions.", end: &["<|tool_call_argument_begin|>"] }, Named, Anywhere;
    "deepseek-v4" ["<｜DSML｜tool_calls>"] ["<｜DSML｜invoke name=\""] ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"]
        Body::Tags(&DSML), Hex, Marker;
    "deepseek-v3.2" ["｜DSML｜"] ["<｜DSML｜invoke name=\""] ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"]
        Body::Tags(&DSML), Hex, Marker;
    "deepseek-v3" ["<｜tool▁call▁begin｜>", "```json"] ["<｜tool▁call▁begin｜>"]
        ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "```"]
        Body::Named { prefix: "function<｜tool▁sep｜>", end: &["\n```json\n", "\n"] }, Hex, Marker;
    "deepseek-v3.1" ["<｜tool▁call▁begin｜>"] ["<｜tool▁call▁begin｜>"]
        ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"]
        Body::Named { prefix: "", end: &["<｜tool▁sep｜>"] }, Hex, Marker;
    "mistral" ["[TOOL_CALLS]", "[ARGS]"] ["[TOOL_CALLS]"] [] Body::Named { prefix: "", end: &["[ARGS]", "[CALL_ID]", "{"] },
        Nine, Marker;
    "mistral-json" ["[TOOL_CALLS]"] ["[TOOL_CALLS]"] [] Body::Json, Nine, Marker;
    "minimax" ["<minimax:tool_call>"] ["<invoke name=\""] ["<minimax:tool_call>", "</minimax:tool_call>"]
        Body::Tags(&MINIMAX), Hex, Marker;
    "seed" ["<seed:tool_call>"] ["<function="] ["<seed:tool_call>", "</seed:tool_call>"] Body::Tags(&SEED), Hex, Marker;
    "qwen3-coder" ["<function=", "<parameter="] ["<function="] ["<tool_call>", "</tool_call>"] Body::Tags(&QWEN), Hex, Marker;
    "glm" ["<arg_key>"] ["<tool_call>"] [] Body::Tags(&GLM), Hex, Marker;
    "lfm2" ["<|tool_call_start|>"] ["<|tool_call_start|>"] ["<|tool_call_end|>"] Body::Python, Hex, Marker;
    "apertus" ["<|tools_prefix|>"] ["<|tools_prefix|>"] ["<|tools_suffix|>"] Body::Keyed, Hex, Marker;
    "command-r7b" ["<|START_ACTION|>"] ["<|START_ACTION|>"]
        ["<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"] Body::Json, Hex, Marker;
    "command-r" ["Write 'Action:'"] ["Action: ```json", "Action:\n```json", "Action:```json"] ["```"] Body::Json, Hex, Marker;
    "phi4" ["<|/tool_call|>"] ["<|tool_call|>", "functools"] ["<|/tool_call|>"] Body::Json, Hex, Marker;
    "granite" ["<|tool_call|>"] ["<|tool_call|>", "<tool_call>"] ["</tool_call>"] Body::Json, Hex, Marker;
    "nemotron" ["<TOOLCALL>"] ["<TOOLCALL>"] ["</TOOLCALL>"] Body::Json, Hex, Marker;
    "jamba" ["<tool_calls>"] ["<tool_calls>"] ["</tool_calls>"] Body::Json, Hex, Marker;
    "functionary-v3.2" [">>>all"] [">>>"] [] Body::Named { prefix: "", end: &["\n"] }, Hex, Prompt;
    "functionary-v3.1" ["<function="] ["<function="] ["</function>"] Body::Named { prefix: "", end: &[">"] }, Hex, Marker;
    "llama4" ["<|python_start|>"] ["<|python_start|>"] ["<|python_end|>"] Body::Python, Hex, Bare;
    "pythonic" ["[func_name1(params_name1"] ["<|python_tag|>"] [] Body::Python, Hex, Bare;
    "llama3" ["<|python_tag|>"] ["<|python_tag|>"] [";"] Body::Json, Hex, Bare;
    "llama3-json" ["\"parameters\": dictionary of argument name"] ["<|python_tag|>"] [";"] Body::Json, Hex, Bare;
    "hermes" ["<tool_call>"] ["<tool_call>"] ["</tool_call>"] Body::Json, Hex, Marker;
    "gemma3" ["```tool_code"] ["```tool_code"] ["```"] Body::Python, Hex, Known;
    "fenced-json" [] ["```json", "```tool_call", "```\n"] ["```"] Body::Json, Hex, Known;
}

/// How a model writes its reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningSyntax {
    /// Name in settings and requests.
    pub name: &'static str,
    /// Before the reasoning.
    pub open: &'static str,
    /// After the reasoning.
    pub close: &'static str,
    /// Whether the marker begins reasoning after content, too: no text of an answer has it otherwise.
    pub repeats: bool,
}

/// All syntaxes of reasoning besides Harmony's.
pub static REASONING: &[ReasoningSyntax] = &[
    ReasoningSyntax { name: "think", open: "<think>", close: "</think>", repeats: false },
    ReasoningSyntax { name: "mistral", open: "[THINK]", close: "[/THINK]", repeats: true },
    ReasoningSyntax { name: "command-r7b", open: "<|START_THINKING|>", close: "<|END_THINKING|>", repeats: true },
    ReasoningSyntax { name: "gemma4", open: "<|channel>thought", close: "<channel|>", repeats: true },
    ReasoningSyntax { name: "seed", open: "<seed:think>", close: "</seed:think>", repeats: true },
    ReasoningSyntax { name: "exaone", open: "<thought>", close: "</thought>", repeats: false },
    ReasoningSyntax { name: "apertus", open: "<|inner_prefix|>", close: "<|inner_suffix|>", repeats: true },
];
