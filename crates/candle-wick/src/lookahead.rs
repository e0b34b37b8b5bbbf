//! Whether reading ahead pays: tokens with guesses are timed against tokens without, again and again.
//!
//! Sixteen tokens without guesses and sixteen with are compared by their medians; the faster way is kept for 512 tokens, at
//! whose end its last sixteen stand against sixteen of the other. So guessing switches itself off where it loses, and
//! on again when that changes (another model competes for the disk, the laptop is on battery).
//!
//! Not here: the guesses (`ahead`).

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::error::Error;

/// When layers read ahead for the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    /// Never.
    #[default]
    Off,
    /// While it makes tokens faster.
    Auto,
    /// Always: for measuring.
    Always,
}

impl Lookahead {
    const ALL: [Self; 3] = [Self::Off, Self::Auto, Self::Always];

    /// The name it goes by on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Always => "always",
        }
    }
}

impl fmt::Display for Lookahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// By [`Lookahead::name`].
impl FromStr for Lookahead {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let mut all = Self::ALL.into_iter();
        all.find(|lookahead| lookahead.name() == name)
            .ok_or_else(|| Error::UnknownName {
                what: "time to look ahead",
                name: name.to_owned(),
                known: "off, auto, always",
            })
    }
}

/// Tokens whose times are compared.
const TRIAL_TOKENS: usize = 16;
/// Tokens for which the faster way is kept.
const KEPT_TOKENS: usize = 512;

/// The running comparison.
#[derive(Debug)]
pub(crate) struct Trials {
    is_on: bool,
    /// Whether `is_on` is what the other way stands against.
    is_trial: bool,
    /// Tokens before the next decision.
    left: usize,
    /// When the token on its way began, if it is timed.
    began: Option<Instant>,
    /// Whether the next token may be the rest of a prompt.
    is_after_pause: bool,
    /// The last tokens' times, in a ring.
    times: [Duration; TRIAL_TOKENS],
    /// Median without guesses, and with.
    medians: [Duration; 2],
}

impl Default for Trials {
    /// The first tokens go without.
    fn default() -> Self {
        Self {
            is_on: false,
            is_trial: false,
            left: TRIAL_TOKENS,
            began: None,
            is_after_pause: false,
            times: [Duration::ZERO; TRIAL_TOKENS],
            medians: [Duration::ZERO; 2],
        }
    }
}

impl Trials {
    /// Whether guesses are to be made for the token that is on its way.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// A token begins at `now`, right behind the one before, or behind a prompt. The first behind a prompt is not timed: the
    /// last of 129 tokens comes alone, and looks like one that is decoded.
    pub(crate) fn begin_token(&mut self, now: Instant) {
        if std::mem::take(&mut self.is_after_pause) {
            return;
        }
        let Some(began) = self.began.replace(now) else {
            return;
        };
        self.times[self.left % TRIAL_TOKENS] = now - began;
        self.left -= 1;
        if self.left == 0 {
            self.decide();
        }
    }

    /// What comes next is no token of the row: the time until then says nothing.
    pub(crate) fn pause(&mut self) {
        self.began = None;
        self.is_after_pause = true;
    }

    fn decide(&mut self) {
        let mut times = self.times;
        times.sort_unstable();
        self.medians[usize::from(self.is_on)] = times[TRIAL_TOKENS / 2];
        if self.is_trial {
            let [without, with] = self.medians;
            self.is_on = with < without;
            self.left = KEPT_TOKENS;
        } else {
            self.is_on = !self.is_on;
            self.left = TRIAL_TOKENS;
        }
        self.is_trial = !self.is_trial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_have_the_names_they_print_as() {
        for lookahead in Lookahead::ALL {
            assert_eq!(
                lookahead.to_string().parse::<Lookahead>().unwrap(),
                lookahead
            );
        }
        let error = "never".parse::<Lookahead>().unwrap_err().to_string();
        assert!(error.contains("off, auto, always"), "{error}");
    }

    /// Which of `count` tokens had guesses, when tokens take so many milliseconds without and with.
    fn run(trials: &mut Trials, now: &mut Instant, count: usize, ms: [u64; 2]) -> Vec<bool> {
        let token = |_| {
            trials.begin_token(*now);
            let is_on = trials.is_on();
            *now += Duration::from_millis(ms[usize::from(is_on)]);
            is_on
        };
        (0..count).map(token).collect()
    }

    #[test]
    fn the_faster_way_is_kept_and_the_other_tried_again() {
        let count = 4 * (KEPT_TOKENS + TRIAL_TOKENS);
        for (ms, is_better) in [([10, 8], true), ([10, 12], false), ([10, 10], false)] {
            let (mut trials, mut now) = (Trials::default(), Instant::now());
            let is_on = run(&mut trials, &mut now, count, ms);
            assert!(is_on[..TRIAL_TOKENS].iter().all(|is_on| !is_on));
            assert!(is_on[TRIAL_TOKENS..2 * TRIAL_TOKENS]
                .iter()
                .all(|is_on| *is_on));
            let kept = &is_on[2 * TRIAL_TOKENS..];
            let with = kept.iter().filter(|is_on| **is_on).count();
            let share = with as f64 / kept.len() as f64;
            assert!(
                (share > 0.9) == is_better && (share < 0.1) != is_better,
                "{share}"
            );
            assert!(
                with > 0 && with < kept.len(),
                "the other way is never tried"
            );
        }
    }

    #[test]
    fn what_changes_is_noticed_and_pauses_count_for_nothing() {
        let (mut trials, mut now) = (Trials::default(), Instant::now());
        run(&mut trials, &mut now, 100, [10, 8]);
        assert!(trials.is_on());
        // Somebody reads what was written, for minutes, again and again.
        for _ in 0..200 {
            trials.pause();
            now += Duration::from_secs(300);
            run(&mut trials, &mut now, 20, [10, 8]);
        }
        let on = run(&mut trials, &mut now, 2 * KEPT_TOKENS, [10, 8]);
        assert!(on.iter().filter(|is_on| **is_on).count() > KEPT_TOKENS);
        run(
            &mut trials,
            &mut now,
            2 * (KEPT_TOKENS + TRIAL_TOKENS),
            [10, 12],
        );
        let off = run(&mut trials, &mut now, 100, [10, 12]);
        assert!(off.iter().filter(|is_on| !**is_on).count() >= 84);
    }

    #[test]
    fn the_rest_of_a_prompt_is_not_timed() {
        let (mut trials, mut now) = (Trials::default(), Instant::now());
        run(&mut trials, &mut now, 4, [10, 8]);
        let left = trials.left;
        trials.pause();
        run(&mut trials, &mut now, 2, [10, 8]);
        assert_eq!(trials.left, left);
        run(&mut trials, &mut now, 1, [10, 8]);
        assert_eq!(trials.left, left - 1);
    }
}
