//! Chat templates, and `starling chat`: a conversation in the terminal.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, context};
use starling::model::Model;

use crate::error::Failure;

/// The template of models that bring none (ChatML).
const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
                      {{ '<|im_start|>assistant\n' }}";
/// Steps a template may take.
const FUEL: u64 = 1_000_000;

/// The prompt that the model's template makes of a conversation of (role, content).
///
/// # Errors
/// If the template fails.
pub fn render(model: &Model, system: Option<&str>, turns: &[(&str, &str)]) -> Result<String, Failure> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|e| Failure::Usage(e.to_string()))?);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
    });
    let system = system.map(|s| ("system", s));
    let messages: Vec<_> =
        system.iter().chain(turns).map(|&(role, content)| context! { role => role, content => content }).collect();
    let special = |id: Option<u32>| {
        let text = id.and_then(|id| model.tokenizer.token_text(id)).unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    };
    let context = context! {
        messages,
        add_generation_prompt => true,
        bos_token => special(model.tokenizer.bos()),
        eos_token => special(model.tokenizer.eos()),
    };
    let template = model.chat_template.as_deref().unwrap_or(CHATML);
    env.render_str(template, context).map_err(|e| Failure::Usage(format!("the model's chat template: {e:#}")))
}
