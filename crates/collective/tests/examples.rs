//! The examples run and find what they say.

// Each example has what they share as a module of its own.
#![allow(clippy::duplicate_mod)]

#[path = "../examples/failures.rs"]
mod failures;
#[path = "../examples/groups.rs"]
mod groups;
#[path = "../examples/movements.rs"]
mod movements;
#[path = "../examples/reductions.rs"]
mod reductions;
#[path = "../examples/transfers.rs"]
mod transfers;

#[test]
fn reductions_are_what_they_say() {
    reductions::main().unwrap();
}

#[test]
fn movements_are_what_they_say() {
    movements::main().unwrap();
}

#[test]
fn transfers_are_what_they_say() {
    transfers::main().unwrap();
}

#[test]
fn groups_are_what_they_say() {
    groups::main().unwrap();
}

#[test]
fn failures_are_what_they_say() {
    failures::main().unwrap();
}
