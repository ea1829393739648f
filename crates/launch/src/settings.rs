//! Settings of a rule: every field once, with its default, range and sentence, for every face.

use crate::{Domain, Objective, RuleError, WeightDecay, check_hyper};

/// A setting of a rule as a face sees it.
pub struct Setting<'a> {
    /// Name in Rust and Python; the command line writes `-` for `_`.
    pub name: &'static str,
    /// Sentences on the setting: its documentation.
    pub says: &'static str,
    /// The value, which may be read and set.
    pub value: SettingValue<'a>,
}

/// The value of a setting.
pub enum SettingValue<'a> {
    /// A number, and the values that it may have.
    Number(&'a mut f64, Domain),
    /// A whole number.
    Count(&'a mut u32),
    /// On or off.
    Switch(&'a mut dyn Switch),
}

/// A setting that is on or off.
pub trait Switch {
    /// Whether it is on.
    fn is_on(&self) -> bool;

    /// Turns it on or off.
    fn turn(&mut self, on: bool);
}

/// A rule whose settings faces read and set by name; [`crate::settings!`] implements it.
pub trait Settings: Copy {
    /// Visits every setting, in the order of the fields.
    fn each(&mut self, visit: &mut dyn FnMut(Setting<'_>));

    /// The numbers among the settings, as plans print them.
    fn numbers(&self) -> Vec<(&'static str, f64)> {
        self.ranged().into_iter().map(|(name, value, _)| (name, value)).collect()
    }

    /// The numbers, and by 1 the switches that are on, but the direction: all that plans print and
    /// ranks compare, of a rule that has nothing of its own to say.
    fn told(&self) -> Vec<(&'static str, f64)> {
        let (mut own, mut found) = (*self, self.numbers());
        own.each(&mut |setting| match setting.value {
            SettingValue::Switch(switch) if switch.is_on() && setting.name != "maximize" => {
                found.push((setting.name, 1.0));
            }
            _ => {}
        });
        found
    }

    /// The kind of decay of a rule that has several: moments contain λ·p with L2 alone.
    fn of_state(&self) -> Vec<(&'static str, String)> {
        let (mut own, mut found) = (*self, Vec::new());
        own.each(&mut |setting| match setting.value {
            SettingValue::Switch(switch) if setting.name == "decoupled" => {
                let kind = if switch.is_on() { "decoupled" } else { "l2" };
                found.push(("weight_decay", kind.to_owned()));
            }
            _ => {}
        });
        found
    }

    /// Checks every number in the order of the fields.
    ///
    /// # Errors
    /// [`RuleError::Hyper`] naming the first one out of range.
    fn check(&self) -> Result<(), RuleError> {
        check_hyper(&self.ranged())
    }

    /// The numbers among the settings with the values that they may have.
    fn ranged(&self) -> Vec<(&'static str, f64, Domain)> {
        let (mut own, mut found) = (*self, Vec::new());
        own.each(&mut |setting| match setting.value {
            SettingValue::Number(value, domain) => found.push((setting.name, *value, domain)),
            SettingValue::Count(value) => {
                found.push((setting.name, f64::from(*value), Domain::NotNegative));
            }
            SettingValue::Switch(_) => {}
        });
        found
    }
}

/// Makes a [`Switch`] of an enum with two values: `switch!(Objective: Minimize, Maximize)`, off
/// first.
#[macro_export]
macro_rules! switch {
    ($type:ty: $off:ident, $on:ident) => {
        impl $crate::Switch for $type {
            fn is_on(&self) -> bool {
                *self == <$type>::$on
            }

            fn turn(&mut self, on: bool) {
                *self = if on { <$type>::$on } else { <$type>::$off };
            }
        }
    };
}

switch!(Objective: Minimize, Maximize);

/// On if decay is decoupled.
impl Switch for WeightDecay {
    fn is_on(&self) -> bool {
        matches!(self, WeightDecay::Decoupled(_))
    }

    fn turn(&mut self, on: bool) {
        let lambda = self.lambda();
        *self = if on { WeightDecay::Decoupled(lambda) } else { WeightDecay::L2(lambda) };
    }
}

/// Defines the settings of a rule: the struct, its `Default`, and [`Settings`].
///
/// Behind each field stand its default and its row: `number(Domain)`, `count`, `switch("name")`,
/// `decay` for a [`WeightDecay`], which is a number and a switch, or `hidden` for a field that
/// faces read in a way of their own. The documentation of a field is its sentence in every face.
#[macro_export]
macro_rules! settings {
    (
        $(#[$meta:meta])*
        pub struct $rule:ident {
            $(
                $(#[doc = $doc:literal])+
                pub $field:ident: $type:ty = $default:expr => $row:ident $(($with:expr))?;
            )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $rule {
            $($(#[doc = $doc])+ pub $field: $type,)+
        }

        impl Default for $rule {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $crate::Settings for $rule {
            fn each(&mut self, visit: &mut dyn FnMut($crate::Setting<'_>)) {
                $($crate::settings!(
                    @$row self, visit, $field, concat!($($doc),+) $(, $with)?
                );)+
            }
        }
    };
    (@number $own:ident, $visit:ident, $field:ident, $says:expr, $domain:expr) => {
        $visit($crate::Setting {
            name: stringify!($field),
            says: $says,
            value: $crate::SettingValue::Number(&mut $own.$field, $domain),
        })
    };
    (@count $own:ident, $visit:ident, $field:ident, $says:expr) => {
        $visit($crate::Setting {
            name: stringify!($field),
            says: $says,
            value: $crate::SettingValue::Count(&mut $own.$field),
        })
    };
    (@switch $own:ident, $visit:ident, $field:ident, $says:expr, $name:expr) => {
        $visit($crate::Setting {
            name: $name,
            says: $says,
            value: $crate::SettingValue::Switch(&mut $own.$field),
        })
    };
    (@decay $own:ident, $visit:ident, $field:ident, $says:expr) => {
        $visit($crate::Setting {
            name: stringify!($field),
            says: $says,
            value: $crate::SettingValue::Number(
                $own.$field.lambda_mut(),
                $crate::Domain::NotNegative,
            ),
        });
        $visit($crate::Setting {
            name: "decoupled",
            says: "Weight decay applied to the parameter, not added to the gradient.",
            value: $crate::SettingValue::Switch(&mut $own.$field),
        })
    };
    (@hidden $own:ident, $visit:ident, $field:ident, $says:expr) => {};
}

#[cfg(test)]
#[expect(unreachable_pub, reason = "the macro makes what other crates show")]
mod tests {
    use super::*;

    settings! {
        /// A rule of every kind of row.
        pub struct Every {
            /// Learning rate per step;
            /// 0.5 by default.
            pub lr: f64 = 0.5 => number(Domain::NotNegative);
            /// Steps of the warm-up.
            pub warmup_steps: u32 = 3 => count;
            /// λ.
            pub weight_decay: WeightDecay = WeightDecay::L2(0.25) => decay;
            /// Direction of the step.
            pub objective: Objective = Objective::Minimize => switch("maximize");
            /// A field that faces set in their own way.
            pub own: u8 = 7 => hidden;
        }
    }

    #[test]
    fn each_row_reads_and_sets_its_field() {
        let mut every = Every::default();
        let mut names = Vec::new();
        every.each(&mut |setting| {
            names.push(setting.name);
            match setting.value {
                SettingValue::Number(value, _) => *value *= 2.0,
                SettingValue::Count(value) => *value += 1,
                SettingValue::Switch(switch) => switch.turn(!switch.is_on()),
            }
        });
        assert_eq!(names, ["lr", "warmup_steps", "weight_decay", "decoupled", "maximize"]);
        let expected = Every {
            lr: 1.0,
            warmup_steps: 4,
            weight_decay: WeightDecay::Decoupled(0.5),
            objective: Objective::Maximize,
            own: 7,
        };
        assert_eq!(every, expected);
        let numbers = [("lr", 1.0), ("warmup_steps", 4.0), ("weight_decay", 0.5)];
        assert_eq!(every.numbers(), numbers);
        let told: Vec<_> = numbers.into_iter().chain([("decoupled", 1.0)]).collect();
        assert_eq!(every.told(), told);
        assert_eq!(every.of_state(), [("weight_decay", "decoupled".to_owned())]);
    }

    #[test]
    fn documentation_is_the_sentence_and_the_first_number_out_of_range_is_named() {
        let mut every = Every { lr: -1.0, ..Every::default() };
        let error = every.check().unwrap_err().to_string();
        assert_eq!(error, "lr: expected a finite value of at least 0, found -1");
        let mut says = String::new();
        every.each(&mut |setting| says += setting.says);
        assert!(says.starts_with(" Learning rate per step; 0.5 by default. Steps"), "{says}");
    }
}
