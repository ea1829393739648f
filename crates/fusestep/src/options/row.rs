//! Rows of the table of settings, and how a face reads them.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use super::OptionError;
use super::choice::{Choice, Named};

/// A setting as a face sees it; its value goes in and out as text.
pub struct Row<'a> {
    /// Name in Rust and Python; the command line writes `-` for `_`.
    pub name: &'static str,
    /// The settings that this one stands among.
    pub section: Section,
    /// One sentence for help, docstrings and the reference page.
    pub says: &'static str,
    /// Values that the setting can have.
    pub range: Cow<'static, str>,
    /// The value's text; `None` where nothing is set.
    pub value: Option<String>,
    /// Names of values, each with its sentence; empty where values have no names.
    pub choices: Vec<Named>,
    /// Whether naming the setting is enough to turn it on.
    pub is_switch: bool,
    /// Whether the setting may be given several times.
    pub is_list: bool,
    /// The setting's effect in a process that trains alone.
    pub alone: Alone,
    /// A setting without which this one has no effect.
    pub needs: Option<Need>,
    /// Settings that contradict this one, whatever the ranks.
    pub conflicts: &'static [Conflict],
    /// Sets the value from its text; in a list, adds it.
    pub set: &'a mut dyn FnMut(&str) -> Result<(), OptionError>,
}

/// A part of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Section {
    /// Settings of some parameters, by their names.
    #[default]
    Parameters,
    /// Learning rate.
    Rate,
    /// Precision of parameters and state.
    Precision,
    /// Gradients of a whole step.
    Gradients,
    /// Micro-steps between updates.
    MicroSteps,
    /// Memory that ranks share out.
    Shares,
    /// Calls between ranks.
    Calls,
    /// Work during the backward pass.
    Backward,
    /// Averages in place of reduced gradients.
    Averages,
    /// First values, and parameters of single ranks.
    Start,
    /// Launches and threads.
    Launches,
}

impl Section {
    /// The section's heading on a page.
    pub fn title(self) -> &'static str {
        match self {
            Self::Parameters => "Settings of some parameters",
            Self::Rate => "Learning rate",
            Self::Precision => "Precision",
            Self::Gradients => "All gradients of a step",
            Self::MicroSteps => "Micro-steps",
            Self::Shares => "Memory that ranks share out",
            Self::Calls => "Calls between ranks",
            Self::Backward => "Updates during the backward pass",
            Self::Averages => "Averages in place of reduced gradients",
            Self::Start => "First values and slices",
            Self::Launches => "Launches and threads",
        }
    }

    /// The heading in a command's help, under which sections of one subject stand together.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Parameters | Self::Rate => "Rule",
            Self::Precision => "Precision",
            Self::Gradients => "Clipping and scaling",
            Self::MicroSteps => "Accumulation",
            Self::Backward => "Backward pass",
            Self::Shares | Self::Calls | Self::Averages | Self::Start => "Ranks",
            Self::Launches => "Launches and threads",
        }
    }
}

/// The effect of a setting in a process that trains alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alone {
    /// It acts there as on ranks.
    #[default]
    Acts,
    /// It acts there with this setting.
    ActsWith(&'static str),
    /// It has none.
    Idle,
}

/// A setting without which another one has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// The setting.
    pub with: &'static str,
    /// Its one value that works; any but its default if `None`.
    pub at: Option<&'static str>,
    /// The values that work, in words behind its name; empty where any does.
    pub works: &'static str,
}

impl Need {
    /// A need of any value but the default; `works` says which there are.
    pub(super) const fn of(with: &'static str, works: &'static str) -> Self {
        Self { with, at: None, works }
    }

    /// A need of one value.
    pub(super) const fn at(with: &'static str, value: &'static str) -> Self {
        Self { with, at: Some(value), works: value }
    }
}

/// A setting that another one contradicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The other setting.
    pub with: &'static str,
    /// The other setting's value that contradicts; any but its default if `None`.
    pub at: Option<&'static str>,
    /// The other setting's value beside its default that does not contradict.
    pub except: Option<&'static str>,
    /// A third setting; where it is set, the two go together.
    pub unless: Option<&'static str>,
    /// The number of ranks from which on the two contradict each other.
    pub from_ranks: usize,
    /// The reason.
    pub why: &'static str,
}

impl Conflict {
    /// A conflict on any number of ranks, with any value but the default.
    pub(super) const fn of(with: &'static str, why: &'static str) -> Self {
        Self { with, at: None, except: None, unless: None, from_ranks: 1, why }
    }

    /// The one value that contradicts.
    pub(super) const fn at(self, value: &'static str) -> Self {
        Self { at: Some(value), ..self }
    }

    /// The one value that does not contradict.
    pub(super) const fn except(self, value: &'static str) -> Self {
        Self { except: Some(value), ..self }
    }

    /// The third setting beside which the two go together.
    pub(super) const fn unless(self, name: &'static str) -> Self {
        Self { unless: Some(name), ..self }
    }

    /// A conflict of several ranks alone.
    pub(super) const fn on_ranks(self) -> Self {
        Self { from_ranks: 2, ..self }
    }
}

/// A face's reading of the table: flags, keyword arguments, a page.
pub trait Visit {
    /// Takes the next row.
    ///
    /// # Errors
    /// Those of [`Row::set`], or of the face itself; the first ends the visit.
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError>;
}

/// A row's words beside its name and value.
#[derive(Clone, Copy, Default)]
pub(super) struct About {
    pub(super) says: &'static str,
    pub(super) alone: Alone,
    pub(super) needs: Option<Need>,
    pub(super) conflicts: &'static [Conflict],
}

impl From<&'static str> for About {
    fn from(says: &'static str) -> Self {
        Self { says, ..Self::default() }
    }
}

impl About {
    /// A sentence on a setting of many ranks.
    pub(super) fn of_ranks(says: &'static str) -> Self {
        Self { alone: Alone::Idle, ..Self::from(says) }
    }

    /// Names the setting with which this one acts in a process that trains alone.
    pub(super) fn alone_with(self, name: &'static str) -> Self {
        Self { alone: Alone::ActsWith(name), ..self }
    }

    /// Names the setting without which this one has no effect.
    pub(super) fn needs(self, need: Need) -> Self {
        Self { needs: Some(need), ..self }
    }

    /// Names the settings that contradict this one.
    pub(super) fn conflicts(self, conflicts: &'static [Conflict]) -> Self {
        Self { conflicts, ..self }
    }
}

/// Makes rows of fields.
pub(super) struct Rows<'v> {
    pub(super) visit: &'v mut dyn Visit,
    /// The part of the table that the next rows are in.
    pub(super) section: Section,
}

impl Rows<'_> {
    /// A finite number above 0.
    pub(super) fn above_0(
        &mut self,
        name: &'static str,
        field: &mut Option<f64>,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let expected = "a finite number above 0";
        let parse = |text: &str| {
            let number = text.parse::<f64>().ok();
            number.filter(|number| number.is_finite() && *number > 0.0)
        };
        self.optional(
            Field { name, field, expected: expected.into() },
            parse,
            f64::to_string,
            about,
        )
    }

    /// A whole number.
    pub(super) fn count<T: Copy + TryFrom<u64> + ToString>(
        &mut self,
        name: &'static str,
        field: &mut T,
        range: RangeInclusive<u64>,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let mut held = Some(*field);
        let expected = whole(&range);
        let field_of = Field { name, field: &mut held, expected };
        self.optional(field_of, |text| parse_whole(text, &range), T::to_string, about)?;
        *field = held.unwrap_or(*field);
        Ok(())
    }

    /// A whole number, or none.
    pub(super) fn count_or_none<T: Copy + TryFrom<u64> + ToString>(
        &mut self,
        name: &'static str,
        field: &mut Option<T>,
        range: RangeInclusive<u64>,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let expected = whole(&range);
        let field = Field { name, field, expected };
        self.optional(field, |text| parse_whole(text, &range), T::to_string, about)
    }

    /// A value that has a name.
    pub(super) fn choice<C: Choice>(
        &mut self,
        name: &'static str,
        field: &mut C,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let names: Vec<&str> = C::ALL.iter().map(|(named, _)| named.name).collect();
        let expected: Cow<'static, str> = names.join(" or ").into();
        let choices = C::ALL.iter().map(|(named, _)| *named).collect();
        let value = field.named().map(|named| named.name.to_owned());
        let set = &mut |text: &str| {
            let found = C::ALL.iter().find(|(named, _)| named.name == text);
            *field = found.map(|(_, value)| *value).ok_or_else(|| OptionError::Range {
                name,
                expected: expected.to_string(),
                found: text.to_owned(),
            })?;
            Ok(())
        };
        let section = self.section;
        let rest = row(name, expected.clone(), value, about.into(), set);
        self.visit.row(Row { choices, section, ..rest })
    }

    /// On or off.
    pub(super) fn switch(
        &mut self,
        name: &'static str,
        field: &mut bool,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let expected = Cow::Borrowed("true or false");
        let value = Some(field.to_string());
        let set = &mut |text: &str| {
            *field = text.parse().map_err(|_| OptionError::Range {
                name,
                expected: "true or false".to_owned(),
                found: text.to_owned(),
            })?;
            Ok(())
        };
        let section = self.section;
        let rest = row(name, expected, value, about.into(), set);
        self.visit.row(Row { is_switch: true, section, ..rest })
    }

    /// A value with a text of its own, or none.
    pub(super) fn optional<T>(
        &mut self,
        field: Field<'_, T>,
        parse: impl Fn(&str) -> Option<T>,
        text: impl Fn(&T) -> String,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let expected = field.expected.clone();
        let parse = |text: &str| parse(text).ok_or_else(|| expected.to_string());
        self.told(field, parse, text, about)
    }

    /// Row of [`Rows::optional`] whose reader says by itself what it expected.
    pub(super) fn told<T>(
        &mut self,
        field: Field<'_, T>,
        parse: impl Fn(&str) -> Result<T, String>,
        text: impl Fn(&T) -> String,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let Field { name, field, expected } = field;
        let value = field.as_ref().map(text);
        let set = &mut |text: &str| {
            let refused = |expected| OptionError::Range { name, expected, found: text.to_owned() };
            *field = Some(parse(text).map_err(refused)?);
            Ok(())
        };
        let section = self.section;
        let rest = row(name, expected.clone(), value, about.into(), set);
        self.visit.row(Row { section, ..rest })
    }

    /// Values with a text each.
    pub(super) fn list<T>(
        &mut self,
        field: ListField<'_, T>,
        parse: impl Fn(&str) -> Option<T>,
        text: impl Fn(&T) -> String,
        about: impl Into<About>,
    ) -> Result<(), OptionError> {
        let ListField { name, field, expected } = field;
        let texts: Vec<String> = field.iter().map(text).collect();
        let value = (!texts.is_empty()).then(|| texts.join("; "));
        let set = &mut |text: &str| {
            let found = parse(text).ok_or_else(|| OptionError::Range {
                name,
                expected: expected.to_owned(),
                found: text.to_owned(),
            })?;
            field.push(found);
            Ok(())
        };
        let expected = Cow::Borrowed(expected);
        let section = self.section;
        let rest = row(name, expected, value, about.into(), set);
        self.visit.row(Row { is_list: true, section, ..rest })
    }
}

/// A field that may have no value.
pub(super) struct Field<'a, T> {
    pub(super) name: &'static str,
    pub(super) field: &'a mut Option<T>,
    pub(super) expected: Cow<'static, str>,
}

/// A field with any number of values.
pub(super) struct ListField<'a, T> {
    pub(super) name: &'static str,
    pub(super) field: &'a mut Vec<T>,
    pub(super) expected: &'static str,
}

fn row<'a>(
    name: &'static str,
    range: Cow<'static, str>,
    value: Option<String>,
    about: About,
    set: &'a mut dyn FnMut(&str) -> Result<(), OptionError>,
) -> Row<'a> {
    Row {
        name,
        says: about.says,
        section: Section::default(),
        range,
        value,
        choices: Vec::new(),
        is_switch: false,
        is_list: false,
        alone: about.alone,
        needs: about.needs,
        conflicts: about.conflicts,
        set,
    }
}

fn parse_whole<T: TryFrom<u64>>(text: &str, range: &RangeInclusive<u64>) -> Option<T> {
    let number = text.parse::<u64>().ok().filter(|number| range.contains(number))?;
    T::try_from(number).ok()
}

fn whole(range: &RangeInclusive<u64>) -> Cow<'static, str> {
    match *range.end() {
        u64::MAX => format!("a whole number from {} on", range.start()).into(),
        most => format!("a whole number from {} to {most}", range.start()).into(),
    }
}
