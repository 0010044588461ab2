//! The path of requests that continue a text without a chat template: Ollama's raw prompts and llama-server's completions.

use std::sync::Arc;

use starling::model::Model;
use starling::sampler::SamplingOptions;
use starling::tokenizer::EncodeOptions;
use starling_api::infill::Infill;
use starling_api::input::Input;
use starling_api::llama_server::prompt::{LlamaPrompt, PromptPart};
use starling_api::openai::options::{Logprobs, Options, RequestPlan};
use starling_api::openai::response::ResponseHead;
use starling_api::structure::OutputConstraint;

use super::answer::response_head;
use super::messages::offload_tokenize;
use super::options::{flow, is_seeded, limits, salt, sampling, seed, slot, sticky};
use super::structure::{Compilation, Compiled};
use super::submit::{Submission, Updates, check_count, submit};
use crate::guard::policy::{apply_to_input, apply_to_joined, apply_to_text};
use crate::http::error::ApiError;
use crate::models::instance::ModelInstance;
use crate::server::{Caller, Server};

/// A prompt.
pub enum TextPrompt {
    /// Texts and tokens.
    Mixed(LlamaPrompt),
    /// A gap to fill.
    Infill(Infill),
}

/// A request to continue prompts; `param` is the field that holds them.
pub struct TextRequest {
    pub options: Options,
    pub constraint: OutputConstraint,
    pub logprobs: Logprobs,
    pub prompts: Vec<TextPrompt>,
    /// Added to the logits of the tokens of texts.
    pub text_biases: Vec<(String, f32)>,
    pub param: &'static str,
}

/// Texts in the queue.
pub struct StartedText {
    pub instance: Arc<ModelInstance>,
    pub updates: Updates,
    pub head: ResponseHead,
    /// Tokens of the prompts.
    pub prompts: Vec<Vec<u32>>,
    pub sampling: SamplingOptions,
    pub options: Options,
}

/// Applies the server's policy to prompts.
async fn apply_policy(caller: &Caller, instance: &ModelInstance, prompts: &mut [TextPrompt]) -> Result<(), ApiError> {
    if caller.policy.is_none() {
        return Ok(());
    }
    for prompt in prompts {
        match prompt {
            TextPrompt::Mixed(prompt) => match &mut prompt.0[..] {
                [PromptPart::Text(text)] => apply_to_text(&caller.prompt_check(instance), text).await?,
                // what is in several parts cannot be changed, and counts as a whole
                _ => {
                    let (model, parts) = (Arc::clone(&instance.model), std::mem::take(prompt));
                    let tokens = offload_tokenize(parts.bytes(), move || Ok(parts.encode(&model.tokenizer))).await?;
                    apply_to_input(&caller.prompt_check(instance), instance, &mut Input::Tokens(tokens.clone()))
                        .await?;
                    prompt.0 = vec![PromptPart::Tokens(tokens)];
                }
            },
            TextPrompt::Infill(infill) => {
                let files = infill.files.iter_mut().flat_map(|(name, text)| [name, text]);
                for text in files.chain([&mut infill.prefix, &mut infill.suffix]) {
                    apply_to_text(&caller.prompt_check(instance), text).await?;
                }
            }
        }
    }
    Ok(())
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
    let TextRequest { mut options, constraint, logprobs, mut prompts, text_biases, param } = request;
    caller.limit_time(options.timeout)?;
    let instance = server.model(options.model.as_deref(), sticky(&options), caller).await?;
    let flow = flow(&options, caller)?;
    let (n_prompts, max_inputs) = (prompts.len(), instance.settings().max_inputs);
    if n_prompts == 0 || n_prompts > max_inputs {
        return Err(ApiError::param(param, format!("{n_prompts} prompts, expected 1 to {max_inputs}")));
    }
    check_count(&instance, n_prompts)?;
    apply_policy(caller, &instance, &mut prompts).await?;
    let model = Arc::clone(&instance.model);
    let size = |prompt: &TextPrompt| match prompt {
        TextPrompt::Mixed(prompt) => prompt.bytes(),
        TextPrompt::Infill(infill) => infill.bytes(),
    };
    let size = prompts.iter().map(size).sum::<usize>() + text_biases.iter().map(|(text, _)| text.len()).sum::<usize>();
    let is_infill: Vec<bool> = prompts.iter().map(|prompt| matches!(prompt, TextPrompt::Infill(_))).collect();
    let encode = move || {
        let biases: Vec<_> = text_biases.iter().flat_map(|(text, bias)| biases_of(text, *bias, &model)).collect();
        let encode = |prompt| match prompt {
            TextPrompt::Mixed(prompt) => Ok(prompt.encode(&model.tokenizer)),
            TextPrompt::Infill(infill) => infill.encode(&model.tokenizer, param),
        };
        Ok((prompts.into_iter().map(encode).collect::<Result<Vec<_>, _>>()?, biases))
    };
    let (prompts, biases) = offload_tokenize(size, encode).await?;
    for tokens in prompts.iter().zip(is_infill).filter_map(|(tokens, is_infill)| is_infill.then_some(tokens)) {
        apply_to_joined(&caller.prompt_check(&instance), &instance, tokens).await?;
    }
    if !biases.is_empty() {
        options.logit_bias.get_or_insert_default().extend(biases);
    }
    let constraint = Compilation { server, caller, instance: &instance }.constraint(constraint).await?;
    let (seed, is_seeded) = (seed(&options, &instance), is_seeded(&options, &instance));
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let cache_salt = salt(&options, &instance, caller)?;
    let (constraint, form) = Compiled::unzip(constraint);
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt };
    let sampling = plan.sampling.clone();
    let request = |tokens: &Vec<u32>| options.request(&limits(&instance), &plan, tokens.clone(), param);
    let requests = prompts.iter().map(request).collect::<Result<Vec<_>, _>>()?;
    let partial = options.timeout_partial == Some(true);
    let submission = Submission { requests, n: 1, partial, is_seeded, form, slot: slot(&options) };
    let updates = submit(server, &instance, caller, &flow, submission).await?;
    let head = response_head(&instance, prefix, seed, None);
    Ok(StartedText { instance, updates, head, prompts, sampling, options })
}

/// Biases of the tokens of a text, by token ID.
fn biases_of(text: &str, bias: f32, model: &Model) -> Vec<(String, f32)> {
    let tokens = model.tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: false });
    tokens.into_iter().map(|token| (token.to_string(), bias)).collect()
}
