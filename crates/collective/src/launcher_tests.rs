use super::*;

fn read(variables: &str) -> Option<Started> {
    let all: Vec<(&str, &str)> = variables.split(' ').filter_map(|v| v.split_once('=')).collect();
    started_in(&|name| {
        let found = all.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// What launchers set for rank 1 of 4, or of 2 on each of two machines.
const SEVERAL: [&str; 14] = [
    "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
     TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 GROUP_RANK=0 GROUP_WORLD_SIZE=1 \
     ROLE_RANK=1 ROLE_WORLD_SIZE=4",
    "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 \
     OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=prte@1",
    "PMI_SIZE=4 PMI_RANK=1 PMI_FD=9 MPI_LOCALNRANKS=4 MPI_LOCALRANKID=1",
    "MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_LOCAL_RANK=1",
    "MVP_COMM_WORLD_SIZE=4 MVP_COMM_WORLD_RANK=1",
    "MPI_NRANKS=4 MPI_RANKID=1",
    "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_LOCALID=1",
    "PALS_RANKID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 PMI_RANK=1 PMI_SIZE=4",
    "FLUX_JOB_SIZE=4 FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 PMI_FD=3 PMI_RANK=1 PMI_SIZE=4",
    "JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_LOCAL_RANK=1",
    "PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.7.0",
    "HOROVOD_SIZE=4 HOROVOD_RANK=1 HOROVOD_LOCAL_RANK=1",
    "ALPS_APP_PE=1",
];

/// Of torchrun's, what programs and scripts set without any launcher.
const NO_EVIDENCE: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

/// What says "the only one" or "the first" of a machine where there are others.
fn says_nothing(variable: &str) -> bool {
    let (name, value) = variable.split_once('=').unwrap();
    NO_EVIDENCE.contains(&name) || name == "GROUP_WORLD_SIZE" && value == "1"
}

#[test]
fn any_subset_of_a_launchers_variables_says_that_there_are_several() {
    for whole in SEVERAL {
        let variables: Vec<&str> = whole.split(' ').filter(|one| !says_nothing(one)).collect();
        for chosen in 1u32..1 << variables.len() {
            let subset = variables.iter().enumerate();
            let subset = subset.filter(|(at, _)| (chosen >> at) & 1 == 1).map(|(_, one)| *one);
            let subset = subset.collect::<Vec<_>>().join(" ");
            let found = read(&subset).unwrap_or_else(|| panic!("{subset}: alone"));
            let told = found.to_string();
            assert!(told.contains(&format!("({}={})", found.variable, found.value)), "{told}");
            assert!(found.ranks.is_none_or(|ranks| ranks == 4), "{subset}: {told}");
        }
        assert_eq!(read(&format!("{whole} FUSESTEP_ALONE=1")), None);
        assert!(read(&format!("{whole} FUSESTEP_ALONE=0")).is_some());
    }
}

#[test]
fn the_first_of_several_is_one_of_several() {
    for first in [
        "RANK=0",
        "LOCAL_RANK=0",
        "WORLD_SIZE=4",
        "WORLD_SIZE=4 RANK=0",
        "GROUP_WORLD_SIZE=2 WORLD_SIZE=1",
        "TORCHELASTIC_RUN_ID=7",
        "OMPI_COMM_WORLD_RANK=0",
        "PMI_RANK=0",
        "PMI_FD=4",
        "MPI_LOCALNRANKS=2",
        "PMIX_RANK=0",
        "PMIX_NAMESPACE=prte@1",
        "PMIX_RANK=0 WORLD_SIZE=1 RANK=0",
        "PALS_RANKID=0 PALS_LOCAL_SIZE=1",
        "FLUX_TASK_RANK=0",
        "JSM_NAMESPACE_RANK=0",
        "SLURM_STEP_ID=0",
        "SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_PROCID=0",
        "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0",
        // Numbers that are none, and places that contradict them.
        "WORLD_SIZE=two",
        "WORLD_SIZE=0",
        "OMPI_COMM_WORLD_SIZE=many",
        "RANK=3 WORLD_SIZE=1",
        "LOCAL_WORLD_SIZE=2 WORLD_SIZE=1 RANK=0",
        // One launcher within another.
        "OMPI_COMM_WORLD_SIZE=4 RANK=0 WORLD_SIZE=1",
        "SLURM_STEP_NUM_TASKS=1 PMI_SIZE=2",
        // prterun within `srun -n 1`, which tells its processes no number.
        "SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMIX_RANK=0 \
         PMIX_NAMESPACE=prterun-node7-4711@1",
        "SLURM_STEP_NUM_TASKS=1 PMIX_NAMESPACE=prte@1",
    ] {
        assert!(read(first).is_some(), "{first}");
    }
}

#[test]
fn a_process_alone_and_a_batch_script_stand_alone() {
    for alone in [
        "",
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1 \
         ROLE_RANK=0 ROLE_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0",
        "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0 PMIX_NAMESPACE=prte@1",
        "PMI_SIZE=1 PMI_RANK=0 PMI_FD=5 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0",
        // sbatch --ntasks=8, salloc, and the shell that an allocation gives.
        "SLURM_JOB_ID=9 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_PROCID=0 SLURM_LOCALID=0 \
         SLURM_NODEID=0 SLURM_TASKS_PER_NODE=4(x2) SLURM_JOB_NUM_NODES=2",
        "SLURM_JOB_ID=9 SLURM_NTASKS=8 SLURM_NNODES=2",
        "SLURM_JOB_ID=9 SLURM_NTASKS=8 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 \
         SLURM_PROCID=0",
        "SLURM_NTASKS=8 SLURM_STEP_ID=4294967291",
        // srun -n 1, alone and by PMIx.
        "SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1 SLURM_PROCID=0 \
         SLURM_STEP_NUM_NODES=1",
        "SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0 PMIX_NAMESPACE=slurm.pmix.9.3",
        "OMPI_COMM_WORLD_SIZE=1 RANK=0",
        "PALS_RANKID=0 PALS_LOCAL_RANKID=0 PMI_SIZE=1 PMI_RANK=0",
        "FLUX_JOB_SIZE=1 FLUX_TASK_RANK=0 FLUX_JOB_NNODES=1",
        // mpirun of one process within `srun -n 1`.
        "SLURM_STEP_NUM_TASKS=1 OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0 PMIX_NAMESPACE=prterun-n-1@1",
        "WORLD_SIZE= RANK=",
        "OMPI_COMM_WORLD_SIZE=4 FUSESTEP_ALONE=1",
    ] {
        assert_eq!(read(alone), None, "{alone}");
    }
}

#[test]
fn the_launcher_that_tells_the_number_is_named() {
    let found = read("PMIX_RANK=0 PMIX_NAMESPACE=x RANK=0 OMPI_COMM_WORLD_SIZE=4").unwrap();
    assert_eq!((found.ranks, found.carrier), (Some(4), Carrier::Mpi));
    let told = "4 processes were started together by mpirun of Open MPI (OMPI_COMM_WORLD_SIZE=4)";
    assert_eq!(found.to_string(), told);
    // One torchrun for each machine, which srun has started.
    let found = read("SLURM_STEP_NUM_TASKS=2 RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2").unwrap();
    assert_eq!((found.ranks, found.carrier), (Some(4), Carrier::Addresses));
}
