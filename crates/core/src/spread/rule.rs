//! A workload's rule, read once from annotations and labels.

use std::time::Duration;

use crate::cron::{self, Schedule, Window};
use crate::duration;
use crate::keys::{self, Lookup};

use super::split::{Share, Split};

/// How one workload is split and when it may be moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pub share: Share,
    /// Absent means at any time.
    pub window: Option<Window>,
}

impl Rule {
    #[must_use]
    pub fn split(&self, total: u32) -> Split {
        self.share.split(total)
    }

    /// In a namespace that states this window, which counts where the workload states none of its own.
    pub fn within(self, around: &Result<Option<Window>, Invalid>) -> Result<Self, Invalid> {
        let window = if self.window.is_some() { self.window } else { around.clone()? };
        Ok(Self { window, ..self })
    }

    /// As people and fingerprints see it.
    #[must_use]
    pub fn text(&self) -> String {
        let Share { percentage, floor } = self.share;
        format!("{percentage}% spot, at least {floor} on-demand")
    }
}

/// The first thing that is wrong with a rule; the text names the key and the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("invalid {key} value {0:?}: expected a whole number from 0 to 100, with or without %", key = keys::SPREAD_PERCENTAGE)]
    Percentage(String),
    #[error("invalid {key} value {0:?}: expected a whole number from 0 to {MAX_FLOOR}", key = keys::SPREAD_FLOOR)]
    Floor(String),
    #[error("invalid {key} value {value:?}: {why}", key = keys::SPREAD_SCHEDULE)]
    Schedule { value: String, why: cron::Invalid },
    #[error("invalid {key} value {value:?}: {why}", key = keys::SPREAD_DURATION)]
    Duration { value: String, why: String },
    #[error("{given} is given without {missing}: a window needs both")]
    HalfAWindow { given: &'static str, missing: &'static str },
}

const MAX_FLOOR: u32 = 10_000;

/// Whether the workload opted in: the annotation decides where it is given, the label where it is not.
pub fn enabled(annotations: &impl Lookup, labels: &impl Lookup) -> bool {
    let given = |map: Option<&str>| map.filter(|value| !value.is_empty()).map(|value| value == "true");
    given(annotations.value(keys::SPREAD_ENABLED))
        .or_else(|| given(labels.value(keys::SPREAD_ENABLED)))
        .unwrap_or(false)
}

/// The rule of a workload that opted in, by its own annotations; `None` when nothing says how to split it.
pub fn read(annotations: &impl Lookup) -> Result<Option<Rule>, Invalid> {
    let percentage = value(annotations, keys::SPREAD_PERCENTAGE).map(percentage).transpose()?;
    let floor = value(annotations, keys::SPREAD_FLOOR).map(floor).transpose()?;
    if percentage.is_none() && floor.is_none() {
        return Ok(None);
    }
    let window = window(annotations)?;
    let share = Share { percentage: percentage.unwrap_or(0), floor: floor.unwrap_or(0) };
    Ok(Some(Rule { share, window }))
}

fn value<'a>(map: &'a impl Lookup, key: &str) -> Option<&'a str> {
    map.value(key).filter(|value| !value.is_empty())
}

/// Digits only: no sign, no blanks, no fraction, no exponent.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

fn percentage(text: &str) -> Result<u8, Invalid> {
    let bare = text.strip_suffix('%').unwrap_or(text);
    let parsed = number(bare).filter(|p| *p <= 100).and_then(|p| u8::try_from(p).ok());
    parsed.ok_or_else(|| Invalid::Percentage(text.to_owned()))
}

fn floor(text: &str) -> Result<u32, Invalid> {
    number(text).filter(|m| *m <= MAX_FLOOR).ok_or_else(|| Invalid::Floor(text.to_owned()))
}

/// The window that a workload or a namespace states.
pub fn window(map: &impl Lookup) -> Result<Option<Window>, Invalid> {
    let (schedule, lasting) = match (value(map, keys::SPREAD_SCHEDULE), value(map, keys::SPREAD_DURATION)) {
        (None, None) => return Ok(None),
        (Some(schedule), Some(lasting)) => (schedule, lasting),
        (Some(_), None) => return Err(half(keys::SPREAD_SCHEDULE, keys::SPREAD_DURATION)),
        (None, Some(_)) => return Err(half(keys::SPREAD_DURATION, keys::SPREAD_SCHEDULE)),
    };
    let parsed = Schedule::parse(schedule).map_err(|why| Invalid::Schedule { value: schedule.to_owned(), why })?;
    let bad = |why: String| Invalid::Duration { value: lasting.to_owned(), why };
    let duration = duration::parse(lasting).map_err(|e| bad(e.to_string()))?;
    if duration == Duration::ZERO {
        return Err(bad("must be longer than 0".to_owned()));
    }
    Ok(Some(Window { schedule: parsed, duration }))
}

const fn half(given: &'static str, missing: &'static str) -> Invalid {
    Invalid::HalfAWindow { given, missing }
}

#[cfg(test)]
mod tests;
