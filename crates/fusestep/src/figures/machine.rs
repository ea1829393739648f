//! The machine that figures are of: its processor and the day.

use std::num::NonZeroUsize;
use std::{fs, thread};

/// Name of the processor, as Linux tells it; elsewhere its architecture.
pub(super) fn processor() -> String {
    let told = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = told.lines().find_map(|line| {
        let (key, name) = line.split_once(':')?;
        (key.trim() == "model name").then(|| name.trim().to_owned())
    });
    named.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Number of processors that this process may use.
pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The day that is so many days after 1970-01-01, by the Gregorian calendar.
pub(super) fn day(days: u64) -> String {
    // Years begin in March here, so that a leap day is a year's last; eras are 400 years.
    let since = days + 719_468;
    let (era, of_era) = (since / 146_097, since % 146_097);
    let leap_days = of_era / 1_460 + of_era / 146_096 - of_era / 36_524;
    let year_of_era = (of_era - leap_days) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_their_dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_786, "2026-11-29"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(day(days), expected);
        }
        assert!(!processor().is_empty() && processors() > 0);
    }
}
