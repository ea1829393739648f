//! What is promised about files and runs: under faults that a seed decides, and beside files of others.

#[path = "trust/commits.rs"]
mod commits;
#[path = "trust/folders.rs"]
mod folders;
#[path = "trust/states.rs"]
mod states;
