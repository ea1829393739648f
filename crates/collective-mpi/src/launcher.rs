//! Whether a launcher of MPI started this process.

/// Variables in which launchers tell a process how many it is one of: Open MPI's mpirun; MPICH's
/// and Intel's; MVAPICH's.
const VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"];

/// The number of processes that a launcher started together with this one; `None` if this one
/// stands alone.
///
/// A program that is started so and uses one process only would run that often, each run taking
/// itself for the whole.
pub fn launched_ranks() -> Option<usize> {
    ranks_in(|name| std::env::var(name).ok())
}

fn ranks_in(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let found = VARIABLES.iter().find_map(|name| variable(name));
    found?.trim().parse().ok().filter(|&ranks| ranks > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launchers_variables_are_read_and_one_process_is_no_job() {
        let with = |name: &'static str, value: &'static str| {
            ranks_in(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert_eq!(with("OMPI_COMM_WORLD_SIZE", "4"), Some(4));
        assert_eq!(with("PMI_SIZE", " 2\n"), Some(2));
        assert_eq!(with("OMPI_COMM_WORLD_SIZE", "1"), None);
        assert_eq!(with("OMPI_COMM_WORLD_SIZE", "many"), None);
        assert_eq!(with("HOME", "4"), None);
    }
}
