//! A pod is warm before it is Ready.

pub mod endpoint;
mod port;
pub mod rules;
