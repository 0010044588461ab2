//! The policy on texts of a build without it: there is none, and so none of its methods is called.

use std::sync::Arc;
use std::task::{Context, Poll};

use starling::chat::Json;
use starling_api::error::ApiError;
use starling_api::input::Input;
use starling_api::update::Update;
use starling_host::error::Failure;

use crate::config::Settings;
use crate::models::instance::ModelInstance;
use crate::observe::metrics::Metrics;

pub enum TextPolicy {}

pub struct Subject {
    pub model: Arc<str>,
    pub tenant: Arc<str>,
    pub request_id: Arc<str>,
}

pub type PromptCheck = Option<(Arc<TextPolicy>, Arc<Subject>)>;

pub enum AnswerFilters {}

impl TextPolicy {
    /// # Errors
    /// If the settings name a policy.
    pub fn of(settings: &Settings, _: &Arc<Metrics>) -> Result<Option<Arc<TextPolicy>>, Failure> {
        match &settings.policy_file {
            None => Ok(None),
            Some(path) => {
                let message = "this build has no policy on texts (feature `text-policy`)";
                Err(Failure::Usage(format!("policy-file: {}: {message}", path.display())))
            }
        }
    }

    pub fn filter_chat(&self, _: &mut [Json], _: Option<&mut Json>, _: &mut [(String, Json)]) -> Result<(), ApiError> {
        match *self {}
    }
}

impl AnswerFilters {
    pub fn new(policy: Arc<TextPolicy>, _: Arc<Subject>, _: usize) -> Option<AnswerFilters> {
        match *policy {}
    }

    pub fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<(usize, Update)> {
        match *self {}
    }

    pub fn is_asking(&self) -> bool {
        match *self {}
    }

    pub fn push(&mut self, _: usize, _: Update) {
        match *self {}
    }
}

pub async fn apply_to_messages(_: &PromptCheck, _: &mut [Json]) -> Result<(), ApiError> {
    Ok(())
}

pub async fn apply_to_text(_: &PromptCheck, _: &mut String) -> Result<(), ApiError> {
    Ok(())
}

pub async fn apply_to_input(_: &PromptCheck, _: &ModelInstance, _: &mut Input) -> Result<(), ApiError> {
    Ok(())
}

pub async fn apply_to_rendered(_: &PromptCheck, _: &Arc<str>, _: Vec<String>) -> Result<(), ApiError> {
    Ok(())
}

pub async fn apply_to_joined(_: &PromptCheck, _: &ModelInstance, _: &[u32]) -> Result<(), ApiError> {
    Ok(())
}

pub async fn apply_to_seam(_: &PromptCheck, _: &ModelInstance, _: &[u32], _: &str) -> Result<(), ApiError> {
    Ok(())
}
