//! Compiles output constraints, on blocking threads.

use std::sync::Arc;
use std::time::Instant;

use starling::sampler::Constraint;
use starling::structure::{Calls, Form, StructureError};
use starling_api::structure::{OutputConstraint, compile_error, param_of};

use super::super::state::App;
use super::super::trace::Trace;
use super::error::ApiError;

/// Compiles a form; `param` is the path of the request field that defines it.
///
/// # Errors
/// The error in the schema or grammar.
pub async fn compile_form(app: &Arc<App>, param: String, form: Form) -> Result<Arc<dyn Constraint>, ApiError> {
    compile(app, move |app| app.grammars.constraint(&app.model, &form).map_err(|e| (param, e))).await
}

/// Compiles the grammar of tool calls, or of either tool calls or the form `output` with its path in the request.
///
/// # Errors
/// The error, and the path of its field.
pub async fn compile_calls(
    app: &Arc<App>,
    calls: Calls,
    output: Option<(String, Form)>,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let (param, form) = output.unzip();
    let work = move |app: &App| {
        let result = app.grammars.calls(&app.model, &calls, form.as_ref());
        result.map_err(|(part, e)| (param_of(part, param), e))
    };
    compile(app, work).await
}

/// The compiled output constraint of a request, if it has one.
///
/// # Errors
/// The error, and the path of its field.
pub async fn compile_constraint(
    app: &Arc<App>,
    constraint: OutputConstraint,
) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
    match constraint.form()? {
        None => Ok(None),
        Some((param, form)) => compile_form(app, param, form).await.map(Some),
    }
}

async fn compile(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<Arc<dyn Constraint>, (String, StructureError)> + Send + 'static,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let (start, inner) = (Instant::now(), Arc::clone(app));
    let result = tokio::task::spawn_blocking(move || work(&inner)).await;
    Trace::current().stage("grammar", start, Instant::now(), &[]);
    result
        .map_err(|_| ApiError::internal("compiling the grammar failed"))?
        .map_err(|(param, e)| compile_error(&param, &e))
}
