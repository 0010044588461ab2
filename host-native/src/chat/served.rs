//! The chat template of a served model.

use starling::chat::{ChatError, ChatRequest, ChatTemplate, Rendered};
use starling::model::Model;
use starling::tokenizer::Tokenizer;
use starling_api::output::{ModelForms, detect_forms};

use super::{template, template_source};
use crate::error::Failure;

/// A chat template. If that of the model's file has a syntax error, only chats fail: completions and embeddings need none.
pub struct ServedTemplate {
    source: String,
    compiled: Result<ChatTemplate, ChatError>,
}

impl ServedTemplate {
    /// The template of `--chat-template` (`wanted`), the model's, or ChatML.
    ///
    /// # Errors
    /// If the template that is wanted does not exist, or does not parse.
    pub fn new(model: &Model, wanted: Option<&str>) -> Result<ServedTemplate, Failure> {
        if wanted.is_some() {
            let compiled = template(model, wanted)?;
            return Ok(ServedTemplate { source: compiled.source().into(), compiled: Ok(compiled) });
        }
        let source = template_source(model, None)?;
        let compiled = ChatTemplate::new(&source);
        Ok(ServedTemplate { source, compiled })
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Why there are no chats, if the template does not parse.
    pub fn error(&self) -> Option<&ChatError> {
        self.compiled.as_ref().err()
    }

    /// Forms of calls and reasoning; the default ones if the template does not parse.
    pub fn forms(&self, tokenizer: &Tokenizer) -> ModelForms {
        self.compiled.as_ref().map(|template| detect_forms(template, tokenizer)).unwrap_or_default()
    }

    /// Renders a conversation; see [`ChatTemplate::render`].
    ///
    /// # Errors
    /// If the template does not parse, fails or refuses the conversation.
    pub fn render(&self, request: &ChatRequest, tokenizer: &Tokenizer) -> Result<Rendered, ChatError> {
        self.compiled.as_ref().map_err(Clone::clone)?.render(request, tokenizer)
    }
}
