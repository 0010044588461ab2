//! What an answer has to be, in the forms that OpenAI, llama-server and vLLM give it.

use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;
use starling::sampler::Constraint;
use starling::structure::{Calls, CallsPart, Form, StructureError};
use utoipa::ToSchema;

use super::super::state::App;
use super::super::trace::Trace;
use super::error::ApiError;

/// What the answer has to be; at most one of these. A schema is enforced, strict or not. What cannot be enforced is
/// refused by its name.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub struct Structure {
    /// OpenAI's: `{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {...}}`.
    pub response_format: Option<ResponseFormat>,
    /// The schema of JSON (llama-server's name).
    #[schema(value_type = Option<Object>)]
    pub json_schema: Option<Value>,
    /// A grammar in Lark's syntax, as llguidance has it (llama-server's name; GBNF is refused).
    pub grammar: Option<String>,
    /// vLLM's form of all of these.
    pub structured_outputs: Option<StructuredOutputs>,
    /// The schema of JSON, itself or as a text (vLLM's older name).
    #[schema(value_type = Option<Object>)]
    pub guided_json: Option<Value>,
    /// A regular expression that matches the whole answer (vLLM's older name).
    pub guided_regex: Option<String>,
    /// Texts, one of which is the answer (vLLM's older name).
    pub guided_choice: Option<Vec<String>>,
    /// A grammar in Lark's syntax (vLLM's older name).
    pub guided_grammar: Option<String>,
}

/// What form the answer has.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// With the type `json_schema`: the schema.
    pub json_schema: Option<NamedSchema>,
    /// The schema as llama-server takes it here, with either of the types of JSON.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
}

/// A schema with a name. `name` and `description` are for people and `strict` changes nothing: the answer follows the
/// schema either way.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct NamedSchema {
    /// The schema.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
}

/// What the answer has to be; one of these.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub struct StructuredOutputs {
    /// The schema of JSON, itself or as a text.
    #[schema(value_type = Option<Object>)]
    pub json: Option<Value>,
    /// A regular expression that matches the whole answer.
    pub regex: Option<String>,
    /// Texts, one of which is the answer.
    pub choice: Option<Vec<String>>,
    /// A grammar in Lark's syntax.
    pub grammar: Option<String>,
    /// Whether it is JSON, any object.
    pub json_object: Option<bool>,
}

impl Structure {
    /// What the answer has to be, and the part of the request that says so.
    ///
    /// # Errors
    /// If that is no form, or if there are several.
    pub fn form(self) -> Result<Option<(String, Form)>, ApiError> {
        let response_format = self.response_format.map(ResponseFormat::form).transpose()?.flatten();
        let outputs = self.structured_outputs.unwrap_or_default();
        let lark = |text| Form::Lark(text, Vec::new());
        let is_object = outputs.json_object == Some(true);
        let forms = [
            response_format,
            schema("json_schema", self.json_schema)?,
            named("grammar", self.grammar.map(lark)),
            schema("structured_outputs.json", outputs.json)?,
            named("structured_outputs.regex", outputs.regex.map(Form::Regex)),
            named("structured_outputs.choice", outputs.choice.map(Form::Choice)),
            named("structured_outputs.grammar", outputs.grammar.map(lark)),
            named("structured_outputs.json_object", is_object.then(Form::object)),
            schema("guided_json", self.guided_json)?,
            named("guided_regex", self.guided_regex.map(Form::Regex)),
            named("guided_choice", self.guided_choice.map(Form::Choice)),
            named("guided_grammar", self.guided_grammar.map(lark)),
        ];
        let mut forms = forms.into_iter().flatten();
        let (first, second) = (forms.next(), forms.next());
        if let (Some((first, _)), Some((second, _))) = (&first, second) {
            return Err(ApiError::param(&second, format!("{second} is given, but {first} says what the answer is")));
        }
        Ok(first)
    }
}

fn named(param: &str, form: Option<Form>) -> Option<(String, Form)> {
    form.map(|form| (param.into(), form))
}

/// A schema, itself or as a text.
fn schema(param: &str, value: Option<Value>) -> Result<Option<(String, Form)>, ApiError> {
    let value = match value {
        None => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|e| ApiError::param(param, format!("{param} is a text that is not JSON: {e}")))?,
        Some(value) => value,
    };
    Ok(named(param, Some(Form::Schema(value))))
}

impl ResponseFormat {
    fn form(self) -> Result<Option<(String, Form)>, ApiError> {
        let own = schema("response_format.schema", self.schema)?;
        match self.kind.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(own.or_else(|| named("response_format", Some(Form::object())))),
            "json_schema" => {
                let given = self.json_schema.and_then(|named| named.schema);
                let param = "response_format.json_schema.schema";
                let given = schema(param, given)?.or(own);
                given.map(Some).ok_or_else(|| ApiError::param(param, format!("{param} is missing")))
            }
            kind => {
                let message = format!("response_format.type is {kind:?}, expected text, json_object or json_schema");
                Err(ApiError::param("response_format.type", message))
            }
        }
    }
}

/// The constraint of a form; `param` is the part of the request that says it.
///
/// # Errors
/// What is wrong with it.
pub async fn constraint(app: &Arc<App>, param: String, form: Form) -> Result<Arc<dyn Constraint>, ApiError> {
    made(app, move |app| app.grammars.constraint(&app.model, &form).map_err(|e| (param, e))).await
}

/// The constraint of an answer that calls tools; with a form and the part of the request that says it, of an answer that
/// either calls tools or is of that form.
///
/// # Errors
/// Which part of the request is wrong, and how.
pub async fn calling(
    app: &Arc<App>,
    calls: Calls,
    answer: Option<(String, Form)>,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let (param, form) = answer.unzip();
    let param = move |part| match part {
        CallsPart::Tool(i) => format!("tools[{i}].function.parameters"),
        CallsPart::Tools => "tools".into(),
        CallsPart::Answer => param.unwrap_or_default(),
    };
    made(app, move |app| app.grammars.calls(&app.model, &calls, form.as_ref()).map_err(|(i, e)| (param(i), e))).await
}

/// A constraint as `make` makes it, which says what part of the request is wrong if it cannot.
async fn made(
    app: &Arc<App>,
    make: impl FnOnce(&App) -> Result<Arc<dyn Constraint>, (String, StructureError)> + Send + 'static,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let (start, inner) = (Instant::now(), Arc::clone(app));
    // grammars take their time: never on a thread that serves connections
    let made = tokio::task::spawn_blocking(move || make(&inner)).await;
    Trace::current().stage("grammar", start, Instant::now(), &[]);
    made.map_err(|_| ApiError::internal("preparing the grammar failed"))?.map_err(|(param, e)| {
        let error = ApiError::param(&param, format!("{param}: {e}"));
        let is_about_model = matches!(e, StructureError::Vocabulary(_));
        error.code(if is_about_model { "unsupported_parameter" } else { "invalid_grammar" })
    })
}

/// The constraint that a request asks for, if it does.
///
/// # Errors
/// What is wrong with it.
pub async fn asked(app: &Arc<App>, structure: Structure) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
    match structure.form()? {
        None => Ok(None),
        Some((param, form)) => constraint(app, param, form).await.map(Some),
    }
}
