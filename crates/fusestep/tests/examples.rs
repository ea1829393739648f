//! The example programs do what they say.

#[path = "../examples/accumulate_and_checkpoint.rs"]
mod accumulate_and_checkpoint;
#[path = "../examples/four_ranks.rs"]
mod four_ranks;
#[path = "../examples/one_process.rs"]
mod one_process;
#[path = "../examples/quickstart.rs"]
mod quickstart;

#[test]
fn one_process_steps() {
    one_process::main().unwrap();
}

#[test]
fn four_ranks_agree() {
    four_ranks::main().unwrap();
}

#[test]
fn a_run_in_two_halves_ends_as_one_in_a_piece() {
    accumulate_and_checkpoint::main().unwrap();
}

#[test]
fn a_world_of_one_ends_as_one_process() {
    quickstart::main().unwrap();
}
