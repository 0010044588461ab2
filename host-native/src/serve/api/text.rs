//! The path of requests that continue a text without a chat template: Ollama's raw prompts and llama-server's completions.

use std::sync::Arc;

use starling::sampler::SamplingOptions;
use starling::tokenizer::EncodeOptions;
use starling_api::infill::Infill;
use starling_api::input::Input;
use starling_api::openai::options::{Logprobs, OneOrMany, Options, RequestPlan};
use starling_api::openai::response::ResponseHead;
use starling_api::structure::OutputConstraint;

use super::super::models::instance::ModelInstance;
use super::super::policy::{apply_to_input, apply_to_text};
use super::super::state::{Caller, Server};
use super::answer::response_head;
use super::error::ApiError;
use super::messages::offload_tokenize;
use super::options::{flow, is_seeded, limits, salt, sampling, seed, sticky};
use super::structure::{Compiled, compile_constraint};
use super::submit::{Submission, Updates, submit};

/// A prompt.
pub enum TextPrompt {
    /// Text in which control tokens are parsed, after BOS.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
    /// A gap to fill.
    Infill(Infill),
}

/// A request to continue a prompt; `param` is the field that holds it.
pub struct TextRequest {
    pub options: Options,
    pub constraint: OutputConstraint,
    pub logprobs: Logprobs,
    pub prompt: TextPrompt,
    pub param: &'static str,
}

/// A text in the queue.
pub struct StartedText {
    pub instance: Arc<ModelInstance>,
    pub updates: Updates,
    pub head: ResponseHead,
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    pub sampling: SamplingOptions,
    pub options: Options,
    pub stops: Vec<String>,
}

/// Checks, tokenises and queues a request. `prefix` begins the ID of the response.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
pub async fn start_text(
    server: &Server,
    caller: &Caller,
    request: TextRequest,
    prefix: &str,
) -> Result<StartedText, ApiError> {
    let TextRequest { options, constraint, logprobs, mut prompt, param } = request;
    let instance = server.model(options.model.as_deref(), sticky(&options), caller).await?;
    let flow = flow(&options, caller)?;
    match &mut prompt {
        TextPrompt::Text(text) => apply_to_text(caller, &instance, text).await?,
        TextPrompt::Infill(infill) => {
            let files = infill.files.iter_mut().flat_map(|(name, text)| [name, text]);
            for text in files.chain([&mut infill.prefix, &mut infill.suffix]) {
                apply_to_text(caller, &instance, text).await?;
            }
        }
        TextPrompt::Tokens(tokens) => {
            let mut input = Input::Tokens(std::mem::take(tokens));
            apply_to_input(caller, &instance, &mut input).await?;
            if let Input::Tokens(checked) = input {
                *tokens = checked;
            }
        }
    }
    let model = Arc::clone(&instance.model);
    let size = match &prompt {
        TextPrompt::Text(text) => text.len(),
        TextPrompt::Tokens(_) => 0,
        TextPrompt::Infill(infill) => infill.bytes(),
    };
    let special = EncodeOptions { add_special: true, parse_special: true };
    let encode = move || match prompt {
        TextPrompt::Text(text) => Ok(model.tokenizer.encode(&text, special)),
        TextPrompt::Tokens(tokens) => Ok(tokens),
        TextPrompt::Infill(infill) => infill.encode(&model.tokenizer, param),
    };
    let tokens = offload_tokenize(size, encode).await?;
    let constraint = compile_constraint(&instance, constraint).await?;
    let (seed, is_seeded) = (seed(&options, &instance), is_seeded(&options, &instance));
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let cache_salt = salt(&options, &instance, caller)?;
    let (constraint, form) = Compiled::unzip(constraint);
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt };
    let request = options.request(&limits(&instance), &plan, tokens, param)?;
    let (tokens, max_tokens) = (request.tokens.clone(), request.max_tokens.unwrap_or(0));
    let sampling = request.sampling.clone();
    let partial = options.timeout_partial == Some(true);
    let submission = Submission { requests: vec![request], n: 1, partial, is_seeded, form };
    let updates = submit(&instance, caller, &flow, submission).await?;
    let head = response_head(&instance, prefix, seed, None);
    let stops = options.stop.clone().map_or_else(Vec::new, OneOrMany::into_vec);
    Ok(StartedText { instance, updates, head, tokens, max_tokens, sampling, options, stops })
}
