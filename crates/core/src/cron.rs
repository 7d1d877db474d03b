//! Five-field cron schedules and the windows they open.
//!
//! Guarantees: a schedule that never starts is refused when it is read, so that every parsed one has a next start. A
//! start that a clock change skips happens right after the gap; one that a clock change repeats happens once.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp};
use std::time::Duration;

/// Why a text is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("expected 5 fields (minute hour day month weekday), got {0}")]
    Fields(usize),
    #[error("field {0:?} is not understood")]
    Field(String),
    #[error("{value} is outside {min}\u{2013}{max}")]
    Range { value: u8, min: u8, max: u8 },
    #[error("unknown time zone {0:?}")]
    Zone(String),
    #[error("it never starts")]
    Never,
}

/// When something starts.
#[derive(Clone, Debug)]
pub struct Schedule {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    weekdays: u64,
    /// With both days restricted either may match, with one only that one, as cron has it.
    any_day: bool,
    zone: TimeZone,
    text: String,
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// Two leap years with a century without one in between.
const SEARCHED_DAYS: i32 = 366 * 9;

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];

impl Schedule {
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let (zone, fields) = zone(text.trim())?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = fields.as_slice() else {
            return Err(Invalid::Fields(fields.len()));
        };
        // Sunday is both 0 and 7.
        let weekdays = field(weekday, 0, 7, &WEEKDAYS, 0)?;
        let schedule = Self {
            minutes: field(minute, 0, 59, &[], 0)?,
            hours: field(hour, 0, 23, &[], 0)?,
            days: field(day, 1, 31, &[], 0)?,
            months: field(month, 1, 12, &MONTHS, 1)?,
            weekdays: (weekdays | (weekdays >> 7)) & 0x7f,
            any_day: !open(day) && !open(weekday),
            zone,
            text: text.trim().to_owned(),
        };
        // Any instant does: if nothing matches in nine years, nothing ever will.
        schedule.next_after(Timestamp::UNIX_EPOCH).map(|_| ()).ok_or(Invalid::Never)?;
        Ok(schedule)
    }

    /// As it was written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The first start later than `after`.
    #[must_use]
    pub fn next_after(&self, after: Timestamp) -> Option<Timestamp> {
        let from = after.to_zoned(self.zone.clone()).datetime();
        // A clock set back repeats an hour: a start earlier by the wall may be later by the sun.
        let mut date = from.date().checked_sub(Span::new().days(1)).ok()?;
        for _ in 0..SEARCHED_DAYS {
            if self.on(date)
                && let Some(at) = self.first_of_day(date, after)
            {
                return Some(at);
            }
            date = date.tomorrow().ok()?;
        }
        None
    }

    fn on(&self, date: Date) -> bool {
        let month = has(self.months, date.month().unsigned_abs());
        let day = has(self.days, date.day().unsigned_abs());
        let weekday = has(self.weekdays, date.weekday().to_sunday_zero_offset().unsigned_abs());
        month && if self.any_day { day || weekday } else { day && weekday }
    }

    fn first_of_day(&self, date: Date, after: Timestamp) -> Option<Timestamp> {
        let hours = (0..24).filter(|h| has(self.hours, *h));
        let times = hours.flat_map(|h| (0..60).filter(|m| has(self.minutes, *m)).map(move |m| (h, m)));
        times
            .filter_map(|(h, m)| Time::new(i8::try_from(h).ok()?, i8::try_from(m).ok()?, 0, 0).ok())
            .filter_map(|time| self.zone.to_timestamp(DateTime::from_parts(date, time)).ok())
            .find(|at| *at > after)
    }
}

fn has(set: u64, value: u8) -> bool {
    set >> value & 1 == 1
}

fn open(field: &str) -> bool {
    field.starts_with(['*', '?'])
}

fn zone(text: &str) -> Result<(TimeZone, &str), Invalid> {
    let Some(rest) = text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) else {
        return Ok((TimeZone::UTC, text));
    };
    let (name, fields) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    if name == "UTC" {
        return Ok((TimeZone::UTC, fields));
    }
    TimeZone::get(name).map(|zone| (zone, fields)).map_err(|_| Invalid::Zone(name.to_owned()))
}

/// One field as a set of bits: `*`, `5`, `1-5`, `*/10`, `MON-FRI` and lists of these.
fn field(text: &str, min: u8, max: u8, names: &[&str], first_name: u8) -> Result<u64, Invalid> {
    let unknown = || Invalid::Field(text.to_owned());
    let value = |part: &str| -> Result<u8, Invalid> {
        let named = names.iter().position(|name| name.eq_ignore_ascii_case(part));
        let value = match named.and_then(|i| u8::try_from(i).ok()) {
            Some(index) => index + first_name,
            None if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) => {
                part.parse().map_err(|_| unknown())?
            }
            None => return Err(unknown()),
        };
        if (min..=max).contains(&value) { Ok(value) } else { Err(Invalid::Range { value, min, max }) }
    };
    let mut set = 0u64;
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, step.parse::<u8>().ok().filter(|s| *s > 0).ok_or_else(unknown)?),
            None => (part, 1),
        };
        let (low, high) = match range.split_once('-') {
            _ if range == "*" || range == "?" => (min, max),
            Some((low, high)) => (value(low)?, value(high)?),
            // `5/15` means from 5 on.
            None if part.contains('/') => (value(range)?, max),
            None => (value(range)?, value(range)?),
        };
        if low > high {
            return Err(unknown());
        }
        (low..=high).step_by(usize::from(step)).for_each(|v| set |= 1 << v);
    }
    Ok(set)
}

/// A schedule that stays open for a while after each start.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    pub schedule: Schedule,
    pub duration: Duration,
}

/// Whether a window is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    Open,
    /// Until then, where the calendar goes on that long.
    Closed {
        opens: Option<Timestamp>,
    },
}

impl Window {
    #[must_use]
    pub fn at(&self, now: Timestamp) -> Opening {
        // The latest start that could still be open is later than this.
        let earliest = now.checked_sub(self.duration).unwrap_or(Timestamp::MIN);
        match self.schedule.next_after(earliest) {
            Some(start) if start <= now => Opening::Open,
            opens => Opening::Closed { opens },
        }
    }
}

#[cfg(test)]
mod tests;
