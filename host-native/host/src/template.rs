//! The chat template of a model.

use std::path::Path;

use starling::chat::{
    ChatError, ChatRequest, ChatTemplate, DEFAULT_TEMPLATE, Rendered, builtin_template, builtin_template_names,
};
use starling::model::Model;
use starling::tokenizer::Tokenizer;
use starling_api::output::{ModelSyntax, detect_syntaxes};

use crate::error::Failure;
use crate::text_file::text_file;

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
    pub fn forms(&self, tokenizer: &Tokenizer) -> ModelSyntax {
        self.compiled.as_ref().map(|template| detect_syntaxes(template, tokenizer)).unwrap_or_default()
    }

    /// Renders a conversation; see [`ChatTemplate::render`].
    ///
    /// # Errors
    /// If the template does not parse, fails or refuses the conversation.
    pub fn render(&self, request: &ChatRequest, tokenizer: &Tokenizer) -> Result<Rendered, ChatError> {
        self.compiled.as_ref().map_err(Clone::clone)?.render(request, tokenizer)
    }
}

/// The chat template: the one of `--chat-template` (a built-in name or a file), the model's, or ChatML.
///
/// # Errors
/// If there is no such template, or it does not parse.
pub fn template(model: &Model, wanted: Option<&str>) -> Result<ChatTemplate, Failure> {
    let source = template_source(model, wanted)?;
    ChatTemplate::new(&source).map_err(|e| match wanted {
        Some(name) => Failure::Usage(format!("--chat-template {name}: {e}")),
        None => e.into(),
    })
}

/// The source of the chat template.
///
/// # Errors
/// If there is no such template.
fn template_source(model: &Model, wanted: Option<&str>) -> Result<String, Failure> {
    Ok(match wanted {
        None => model.chat_template.clone().unwrap_or_else(|| DEFAULT_TEMPLATE.into()),
        Some(name) => match builtin_template(name) {
            Some(source) => source.into(),
            None if Path::new(name).exists() => text_file(Path::new(name))?,
            None => {
                let names = builtin_template_names().collect::<Vec<_>>().join(", ");
                return Err(Failure::Usage(format!(
                    "no built-in template or file {name}; built-in templates: {names}"
                )));
            }
        },
    })
}
