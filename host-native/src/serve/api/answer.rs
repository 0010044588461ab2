//! Collects the answers of a request.

use starling_api::answer::Answer;
use starling_api::openai::response::ResponseHead;

use super::super::models::instance::ModelInstance;
use super::super::queue::Update;
use super::super::state::{random_id, unix_now};
use super::error::ApiError;
use super::sse::engine_failed;
use super::submit::Updates;

/// The head of a response with a new ID that begins with `prefix`.
pub fn response_head(instance: &ModelInstance, prefix: &str, seed: u64, session: Option<&str>) -> ResponseHead {
    ResponseHead {
        id: random_id(prefix).as_str().into(),
        created: unix_now(),
        model: (*instance.name).into(),
        system_fingerprint: instance.fingerprint.as_str().into(),
        seed,
        session_id: session.map(Into::into),
    }
}

/// Waits for all of `n` answers.
///
/// # Errors
/// The first answer that fails; the others are cancelled.
pub async fn collect(mut updates: Updates, n: usize) -> Result<Vec<Answer>, ApiError> {
    let mut answers: Vec<Answer> = (0..n).map(|_| Answer::default()).collect();
    let mut n_left = n;
    while n_left > 0 {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = update.error() {
            return Err(error);
        }
        n_left -= usize::from(matches!(update, Update::Done { .. }));
        if let Some(answer) = answers.get_mut(index) {
            answer.add(update);
        }
    }
    Ok(answers)
}
