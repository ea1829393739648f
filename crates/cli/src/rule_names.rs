//! Names of rules as other libraries have them, and what is typed here in their place.

use clap::ValueEnum;

use crate::rules::Rule;

/// Names in small letters without marks between words, and flags that ask for the same.
const ELSEWHERE: [(&str, &str); 19] = [
    ("amsgrad", "--optimizer adamw --amsgrad"),
    ("adamamsgrad", "--optimizer adam --amsgrad"),
    ("adamwamsgrad", "--optimizer adamw --amsgrad"),
    ("adamwithdecay", "--optimizer adamw"),
    ("sgdmomentum", "--optimizer momentum"),
    ("sgdm", "--optimizer momentum"),
    ("momentumsgd", "--optimizer momentum"),
    ("sgdwithmomentum", "--optimizer momentum"),
    ("nesterov", "--optimizer momentum --nesterov"),
    ("nag", "--optimizer momentum --nesterov"),
    ("sgdnesterov", "--optimizer momentum --nesterov"),
    ("nesterovmomentum", "--optimizer momentum --nesterov"),
    ("rmspropcentered", "--optimizer rmsprop --centered"),
    ("centeredrmsprop", "--optimizer rmsprop --centered"),
    ("larsmomentum", "--optimizer lars"),
    ("larsgd", "--optimizer lars"),
    ("schedulefreeadamw", "--optimizer schedule-free"),
    ("adamwschedulefree", "--optimizer schedule-free"),
    ("schedulefreeadam", "--optimizer schedule-free"),
];

/// The flags that a name of no rule here stands for.
pub(crate) fn meant(typed: &str) -> Option<String> {
    let plain = |text: &str| -> String {
        let letters = text.chars().filter(|c| !['-', '_', ' '].contains(c));
        letters.flat_map(char::to_lowercase).collect()
    };
    let typed = plain(typed);
    let own = Rule::value_variants().iter().find(|rule| plain(rule.name()) == typed);
    let other = || ELSEWHERE.iter().find(|(name, _)| *name == typed);
    own.map(|rule| format!("--optimizer {}", rule.name())).or_else(|| Some(other()?.1.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::command;

    #[test]
    fn names_of_other_libraries_stand_for_flags_that_there_are() {
        for (name, flags) in ELSEWHERE {
            let typed = format!("fusestep train {flags}");
            let typed: Vec<std::ffi::OsString> = typed.split(' ').map(Into::into).collect();
            command(&typed).try_get_matches_from(&typed).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        for (typed, expected) in [
            ("AdamW", "--optimizer adamw"),
            ("adam_w", "--optimizer adamw"),
            ("AMSGrad", "--optimizer adamw --amsgrad"),
            ("schedule_free", "--optimizer schedule-free"),
            ("sgd_momentum", "--optimizer momentum"),
            ("rmsprop_centered", "--optimizer rmsprop --centered"),
        ] {
            assert_eq!(meant(typed).as_deref(), Some(expected));
        }
        assert_eq!(meant("adamish"), None);
    }
}
