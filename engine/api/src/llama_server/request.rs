//! `POST /completion` and `/infill`: requests.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::{ApiError, quoted};
use crate::fields::wrong;
use crate::infill::Infill;
use crate::llama_server::prompt::LlamaPrompts;
use crate::openai::options::{Logprobs, MAX_TOP, Options, Seed};
use crate::parse::{ParseBody, parse};
use crate::structure::OutputConstraint;

/// Request to continue a prompt, or to fill a gap. Options that a request does not give have the server's defaults.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaCompletionRequest {
    /// Generation options: `n_predict`, below, is `max_tokens`.
    #[serde(flatten)]
    pub options: Options,
    /// Output constraint: `json_schema` or `grammar`.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// Prompt, and options of llama-server.
    #[serde(flatten)]
    pub completion: LlamaFields,
}

/// Prompt, and options of llama-server.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaFields {
    /// Prompt: text, token IDs and texts, an object with `prompt_string`, or a list of them. On `/infill` more text before
    /// the gap.
    pub prompt: Option<LlamaPrompts>,
    /// Maximum number of tokens to generate; -1, the default, for as many as fit, 0 to process the prompt only.
    #[serde(alias = "max_tokens", alias = "max_completion_tokens")]
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub n_predict: Option<i64>,
    /// Log-probabilities of this number of most probable tokens, 0 to 20.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 20))]
    pub n_probs: Option<u32>,
    /// Use the prefix cache. Default and always: true; it changes no byte.
    pub cache_prompt: Option<bool>,
    /// Return the tokens of a whole answer; the parts of a stream always have theirs. Default: false.
    pub return_tokens: Option<bool>,
    /// Fields of the response to return, such as `content` or `generation_settings/n_predict`. Default, or if the list is
    /// empty: all.
    pub response_fields: Option<Vec<String>>,
    /// Accepted: `timings` are always in the last part.
    pub timings_per_token: Option<bool>,
    /// Text before the gap, on `/infill`.
    pub input_prefix: Option<String>,
    /// Text after the gap, on `/infill`.
    pub input_suffix: Option<String>,
    /// Other files, on `/infill`.
    pub input_extra: Option<Vec<ExtraFile>>,
    /// Not supported but as 0.
    pub mirostat: Option<i64>,
    /// Not supported but as 0.
    pub xtc_probability: Option<f32>,
    /// Not supported but as 0.
    pub dynatemp_range: Option<f32>,
    /// Not supported but as -1 or 0.
    pub top_n_sigma: Option<f32>,
    /// Not supported but as 1.
    pub tfs_z: Option<f32>,
    /// End the answer at a line after the first that has less white space in front than this number of characters.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub n_indent: Option<usize>,
    /// Accepted: an answer does not depend on time.
    pub t_max_predict_ms: Option<i64>,
    /// Accepted.
    pub t_max_prompt_ms: Option<i64>,
    /// Not supported: probabilities after sampling.
    pub post_sampling_probs: Option<bool>,
    /// Names of samplers: the others are turned off. Their order must be that of the server: `penalties`, `dry`, `top_k`,
    /// `typ_p`, `top_p`, `min_p`, `temperature`. `infill` is skipped, and named in the response header `x-starling-skipped`.
    pub samplers: Option<Vec<String>>,
    /// Not supported: images.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub image_data: Option<Vec<Value>>,
    /// Not supported: adapters.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub lora: Option<Vec<Value>>,
    /// Biases of the tokens of texts, in `logit_bias`.
    #[serde(skip)]
    pub text_biases: Vec<(String, f32)>,
}

/// A file beside the one with the gap.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExtraFile {
    /// Name of the file.
    #[serde(default)]
    pub filename: String,
    /// Its text.
    pub text: String,
}

impl ParseBody for LlamaCompletionRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        let mut completion: LlamaFields = parse(json)?;
        let mut body: Map<String, Value> = parse(json)?;
        // n_predict may be -1, which max_tokens may not
        for name in ["max_tokens", "max_completion_tokens", "n_predict"] {
            body.remove(name);
        }
        if let Some(n) = completion.n_predict.filter(|n| *n != -1) {
            let n = u64::try_from(n).map_err(|_| wrong("n_predict", &format!("is {n}, expected -1 or more")))?;
            // a token is generated and dropped where only the prompt is to be processed
            body.insert("max_tokens".into(), n.max(1).into());
        }
        if let Some(bias) = body.get_mut("logit_bias") {
            (*bias, completion.text_biases) = logit_bias(bias.take())?;
        }
        let json = serde_json::to_vec(&body).unwrap_or_default();
        let mut options: Options = parse(&json)?;
        // as `/props` tells it
        options.seed = options.seed.filter(|seed| *seed != RANDOM_SEED);
        if let Some(names) = &completion.samplers {
            turn_off_others(&mut options, names)?;
        }
        Ok(LlamaCompletionRequest { options, constraint: parse(&json)?, completion })
    }
}

/// llama-server's value for a random seed, besides -1.
pub const RANDOM_SEED: Seed = Seed(u32::MAX as u64);

/// Samplers in the order in which the server applies them, with llama-server's other names.
const SAMPLERS: [&[&str]; 7] = [
    &["penalties"],
    &["dry"],
    &["top_k", "top-k"],
    &["typ_p", "typical", "typical_p", "typ-p", "typical-p"],
    &["top_p", "top-p"],
    &["min_p", "min-p"],
    &["temperature", "temp"],
];
/// Samplers that are off unless an option turns them on, which is refused.
const ABSENT: [&str; 4] = ["top_n_sigma", "top-n-sigma", "xtc", "adaptive_p"];
/// Merges tokens of a gap that begin alike; skipped.
const INFILL_SAMPLER: &str = "infill";

/// Turns off the samplers that are not in a list.
fn turn_off_others(options: &mut Options, names: &[String]) -> Result<(), ApiError> {
    let mut listed = [false; SAMPLERS.len()];
    let mut last = None;
    for name in names {
        let name = name.as_str();
        let Some(i) = SAMPLERS.iter().position(|sampler| sampler.contains(&name)) else {
            if ABSENT.contains(&name) || name == INFILL_SAMPLER {
                continue;
            }
            let known: Vec<&str> = SAMPLERS.iter().map(|sampler| sampler[0]).collect();
            let message = format!("samplers has {:?}, expected {}", quoted(name), known.join(", "));
            return Err(ApiError::unsupported("samplers", message));
        };
        if last.is_some_and(|last| last >= i) {
            let before = SAMPLERS[last.unwrap_or(0)][0];
            let message = format!("samplers has {name} after {before}, expected the order of this server");
            return Err(ApiError::unsupported("samplers", message));
        }
        (listed[i], last) = (true, Some(i));
    }
    let [penalties, dry, top_k, typical, top_p, min_p, temperature] = listed;
    if !penalties {
        options.repetition_penalty = Some(1.0);
        (options.presence_penalty, options.frequency_penalty) = (Some(0.0), Some(0.0));
    }
    let off = |is_listed: bool, option: &mut Option<f32>, value: f32| {
        if !is_listed {
            *option = Some(value);
        }
    };
    off(dry, &mut options.dry_multiplier, 0.0);
    off(typical, &mut options.typical_p, 1.0);
    off(top_p, &mut options.top_p, 1.0);
    off(min_p, &mut options.min_p, 0.0);
    off(temperature, &mut options.temperature, 1.0);
    if !top_k {
        options.top_k = Some(0);
    }
    Ok(())
}

/// `logit_bias` as an object of token IDs, and the biases of texts. llama-server takes an object or pairs, and false for a
/// ban, here the lowest bias.
fn logit_bias(bias: Value) -> Result<(Value, Vec<(String, f32)>), ApiError> {
    let is_object = bias.is_object();
    let pairs: Vec<Value> = match bias {
        Value::Object(biases) => biases.into_iter().map(|(token, value)| vec![token.into(), value].into()).collect(),
        Value::Array(pairs) => pairs,
        other => return Ok((other, Vec::new())),
    };
    let (mut tokens, mut texts) = (Map::new(), Vec::new());
    for pair in pairs {
        let pair = if let Value::Array(pair) = pair { <[Value; 2]>::try_from(pair).ok() } else { None };
        let Some([token, value]) = pair else {
            return Err(wrong("logit_bias", "has an entry that is not a pair of a token ID or text and a number"));
        };
        let value = if value == Value::Bool(false) { (-100).into() } else { value };
        match (token, value.as_f64()) {
            (Value::Number(id), Some(_)) => drop(tokens.insert(id.to_string(), value)),
            (Value::String(id), Some(_)) if is_object && id.parse::<u32>().is_ok() => drop(tokens.insert(id, value)),
            (Value::String(text), Some(bias)) => texts.push((text, bias as f32)),
            _ => return Err(wrong("logit_bias", "has an entry that is not a token ID or a text with a number")),
        }
    }
    Ok((Value::Object(tokens), texts))
}

impl LlamaFields {
    /// Refuses options that this server does not have; returns the requested log-probabilities.
    ///
    /// # Errors
    /// The first such option, or `n_probs` out of range.
    pub fn check(&self) -> Result<Logprobs, ApiError> {
        let is_not = |value: Option<f32>, off: &[f32]| value.is_some_and(|value| !off.contains(&value));
        let refused = [
            ("mirostat", self.mirostat.is_some_and(|n| n != 0)),
            ("xtc_probability", is_not(self.xtc_probability, &[0.0])),
            ("dynatemp_range", is_not(self.dynatemp_range, &[0.0])),
            ("top_n_sigma", is_not(self.top_n_sigma, &[0.0, -1.0])),
            ("tfs_z", is_not(self.tfs_z, &[1.0])),
            ("post_sampling_probs", self.post_sampling_probs == Some(true)),
            ("image_data", self.image_data.as_ref().is_some_and(|items| !items.is_empty())),
            ("lora", self.lora.as_ref().is_some_and(|items| !items.is_empty())),
        ];
        if let Some((name, _)) = refused.into_iter().find(|(_, is_given)| *is_given) {
            return Err(ApiError::unsupported(name, format!("{name}: this server does not have this option")));
        }
        let n_top = self.n_probs.unwrap_or(0);
        if n_top > MAX_TOP {
            return Err(wrong("n_probs", &format!("is {n_top}, expected a number from 0 to {MAX_TOP}")));
        }
        Ok(Logprobs { is_requested: n_top > 0, n_top, of_prompt: false })
    }

    /// Samplers that are skipped.
    pub fn skipped(&self) -> Vec<String> {
        self.samplers.iter().flatten().filter(|name| *name == INFILL_SAMPLER).cloned().collect()
    }

    /// The gap of a request to `/infill`.
    ///
    /// # Errors
    /// Fields that are missing.
    pub fn infill(&mut self) -> Result<Infill, ApiError> {
        let prefix = self.input_prefix.take().ok_or_else(|| wrong("input_prefix", "is missing"))?;
        let suffix = self.input_suffix.take().ok_or_else(|| wrong("input_suffix", "is missing"))?;
        let more = match self.prompt.take() {
            None => String::new(),
            Some(prompts) => prompts.into_text().ok_or_else(|| wrong("prompt", "is not a string"))?,
        };
        let files = self.input_extra.take().unwrap_or_default();
        let files = files.into_iter().map(|file| (file.filename, file.text)).collect();
        Ok(Infill { prefix: prefix + &more, suffix, files })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse_request(body: Value) -> Result<LlamaCompletionRequest, ApiError> {
        LlamaCompletionRequest::parse_body(body.to_string().as_bytes())
    }

    #[test]
    fn names_of_llama_server_are_read() {
        let request = parse_request(json!({
            "prompt": "Once", "n_predict": 7, "repeat_penalty": 1.2, "repeat_last_n": 64, "n_probs": 3, "id_slot": 1,
            "cache_prompt": true, "logit_bias": [[15, -1.5], [16, false]], "mirostat": 0, "top_n_sigma": -1.0,
        }))
        .expect("a request");
        assert_eq!((request.options.max_tokens, request.options.id_slot), (Some(7), Some(1)));
        assert_eq!((request.options.repetition_penalty, request.options.repeat_last_n), (Some(1.2), Some(64)));
        let bias: Vec<_> = request.options.logit_bias.into_iter().flatten().collect();
        assert_eq!(bias, [("15".into(), -1.5), ("16".into(), -100.0)]);
        assert_eq!(request.completion.check().map(|logprobs| logprobs.n_top), Ok(3));
        for bias in [json!([["a b", -2], ["15", 1], [16, 2]]), json!({ "a b": -2, "15": 1, "16": 2 })] {
            let request = parse_request(json!({ "prompt": "a", "logit_bias": bias })).expect("a request");
            assert_eq!(request.completion.text_biases[0], ("a b".into(), -2.0));
            assert!(request.options.logit_bias.is_some_and(|biases| biases.contains_key("16")));
        }
        assert_eq!(parse_request(json!({ "prompt": "a", "n_predict": -1 })).expect("ok").options.max_tokens, None);
        // a client that sends back what `/props` has
        for (seed, expected) in [(json!(u32::MAX), None), (json!(-1), None), (json!(7.0), Some(Seed(7)))] {
            let request = parse_request(json!({ "prompt": "a", "seed": seed, "n_predict": 5.0 })).expect("a request");
            assert_eq!((request.options.seed, request.options.max_tokens), (expected, Some(5)));
        }
    }

    #[test]
    fn what_would_change_the_answer_is_refused() {
        for (name, value) in [
            ("mirostat", json!(2)),
            ("xtc_probability", json!(0.5)),
            ("dynatemp_range", json!(0.5)),
            ("image_data", json!([{}])),
            ("lora", json!([{ "id": 0, "scale": 1.0 }])),
            ("n_probs", json!(21)),
            ("post_sampling_probs", json!(true)),
        ] {
            let request = parse_request(json!({ "prompt": "a", name: value })).expect("a request");
            assert_eq!(request.completion.check().expect_err("an error").param.as_deref(), Some(name));
        }
        let param = |body: Value| parse_request(body).expect_err("an error").param;
        assert_eq!(param(json!({ "n_predict": -2 })).as_deref(), Some("n_predict"));
        assert_eq!(param(json!({ "logit_bias": [["a"]] })).as_deref(), Some("logit_bias"));
    }

    /// The request of llama.vim.
    #[test]
    fn samplers_that_are_not_listed_are_off() {
        let request = parse_request(json!({
            "id_slot": 0, "input_prefix": "a", "input_suffix": "b", "input_extra": [], "prompt": "", "n_predict": 128,
            "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
            "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "response_fields": ["content"],
        }))
        .expect("a request");
        let Options { top_k, top_p, min_p, typical_p, temperature, repetition_penalty, dry_multiplier, .. } =
            request.options;
        assert_eq!((top_k, top_p, min_p, typical_p), (Some(40), Some(0.9), Some(0.0), Some(1.0)));
        assert_eq!((temperature, repetition_penalty, dry_multiplier), (Some(1.0), Some(1.0), Some(0.0)));
        assert!(request.completion.check().is_ok());
        assert_eq!((request.completion.n_indent, request.completion.skipped()), (Some(4), vec!["infill".to_string()]));
        let all = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];
        let defaults = parse_request(json!({ "prompt": "a", "samplers": all })).expect("a request").options;
        assert_eq!((defaults.top_k, defaults.temperature, defaults.repetition_penalty), (None, None, None));
        for wrong in [json!(["top_p", "top_k"]), json!(["top_k", "top_k"]), json!(["mirostat"])] {
            let error = parse_request(json!({ "prompt": "a", "samplers": wrong })).expect_err("an error");
            assert_eq!(error.param.as_deref(), Some("samplers"));
        }
        // a request that only fills the cache
        let warm = parse_request(json!({ "prompt": "a", "n_predict": 0, "samplers": [] })).expect("a request");
        assert_eq!((warm.options.max_tokens, warm.completion.n_predict), (Some(1), Some(0)));
    }

    #[test]
    fn a_gap_has_two_sides() {
        let infill = |body: Value| parse_request(body).expect("a request").completion.infill();
        let gap = infill(
            json!({ "input_prefix": "a", "prompt": "b", "input_suffix": "c", "input_extra": [{ "filename": "f", "text": "t" }] }),
        );
        let gap = gap.expect("a gap");
        assert_eq!((gap.prefix.as_str(), gap.suffix.as_str(), gap.files.len()), ("ab", "c", 1));
        assert_eq!(
            infill(json!({ "input_prefix": "a" })).expect_err("an error").param.as_deref(),
            Some("input_suffix")
        );
    }
}
