//! Built-in templates for files without one, by llama.cpp's names.

/// The template for models without one: ChatML.
pub const DEFAULT_TEMPLATE: &str = TEMPLATES[0].1;

const TEMPLATES: [(&str, &str); 15] = [
    ("chatml", include_str!("templates/chatml.jinja")),
    ("llama2", include_str!("templates/llama2.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("mistral-v1", include_str!("templates/mistral-v1.jinja")),
    ("mistral-v3", include_str!("templates/mistral-v3.jinja")),
    ("mistral-v3-tekken", include_str!("templates/mistral-v3-tekken.jinja")),
    ("mistral-v7", include_str!("templates/mistral-v7.jinja")),
    ("mistral-v7-tekken", include_str!("templates/mistral-v7-tekken.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
    ("phi3", include_str!("templates/phi3.jinja")),
    ("zephyr", include_str!("templates/zephyr.jinja")),
    ("vicuna", include_str!("templates/vicuna.jinja")),
    ("deepseek", include_str!("templates/deepseek.jinja")),
    ("deepseek3", include_str!("templates/deepseek3.jinja")),
    ("command-r", include_str!("templates/command-r.jinja")),
];

/// The built-in template with this name.
pub fn builtin_template(name: &str) -> Option<&'static str> {
    TEMPLATES.iter().find(|(other, _)| *other == name).map(|(_, template)| *template)
}

/// The names of all built-in templates.
pub fn builtin_template_names() -> impl Iterator<Item = &'static str> {
    TEMPLATES.iter().map(|(name, _)| *name)
}
