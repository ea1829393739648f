//! Calls on memory of the GPU.

use fusestep_collective::{
    CallState, CollectiveError, Collectives, Communicator, DeviceBuffers, DeviceCall, Operation,
    ReduceOp,
};
use fusestep_tensor::DType;

use super::numbers::{input, reduced};
use super::worlds::{group, options, sizes, turn};

fn sum(buffers: DeviceBuffers<'_>) -> DeviceCall<'_> {
    DeviceCall {
        operation: Operation::AllReduce(ReduceOp::Sum),
        dtype: DType::F32,
        counts: None,
        buffers,
    }
}

#[test]
fn device_buffers_are_reduced_where_they_lie() {
    let _turn = turn();
    for ranks in sizes() {
        let numel = 10_007;
        let expected: Vec<f32> = reduced(ReduceOp::Sum, ranks, numel);
        group(ranks, &options(), |mut comm| {
            let own: Vec<f32> = input(comm.rank(), numel);
            let mut buffer = comm.device_buffer(4 * numel).unwrap();
            let mut out_of_place = comm.device_buffer(4 * numel).unwrap();
            buffer.upload(bytemuck::cast_slice(&own)).unwrap();
            let both = DeviceBuffers::OutOfPlace {
                send: buffer.slice_mut(),
                receive: out_of_place.slice_mut(),
            };
            comm.execute_on_device(sum(both)).unwrap();
            comm.execute_on_device(sum(DeviceBuffers::InPlace(buffer.slice_mut()))).unwrap();
            for found in [&buffer, &out_of_place] {
                let mut values = vec![0.0f32; numel];
                found.download(bytemuck::cast_slice_mut(&mut values)).unwrap();
                assert!(values == expected, "{ranks} ranks");
            }
        });
    }
}

#[test]
fn device_calls_are_checked_as_others_are() {
    let _turn = turn();
    group(1, &options(), |mut comm| {
        let mut buffer = comm.device_buffer(6).unwrap();
        assert!(buffer.upload(&[0; 5]).is_err());
        comm.barrier().unwrap();
        let call = DeviceCall {
            operation: Operation::AllReduce(ReduceOp::Sum),
            dtype: DType::F32,
            counts: None,
            buffers: DeviceBuffers::InPlace(buffer.slice_mut()),
        };
        let error = comm.execute_on_device(call).unwrap_err();
        assert!(
            matches!(&error, CollectiveError::Refused { reason, .. } if reason.contains("found 6 bytes")),
            "{error}"
        );
        assert_eq!(comm.barrier(), Err(error), "the group stays closed");
        let states: Vec<_> = comm.recorder().calls().map(|call| call.state).collect();
        assert_eq!(states, [CallState::Done], "what was refused was not begun");
    });
}

#[test]
fn the_context_of_before_is_put_back() {
    let _turn = turn();
    group(1, &options(), |mut comm| {
        let current = || {
            // SAFETY: the driver is loaded; the function writes one pointer.
            unsafe {
                let driver = libloading::Library::new(options().driver_library).unwrap();
                let get = *driver
                    .get::<unsafe extern "C" fn(*mut usize) -> i32>(b"cuCtxGetCurrent")
                    .unwrap();
                let mut context = 1;
                assert_eq!(get(&mut context), 0);
                std::mem::forget(driver);
                context
            }
        };
        let before = current();
        comm.all_reduce(&mut [1.0f32; 9], ReduceOp::Sum).unwrap();
        assert_eq!(current(), before);
    });
}
