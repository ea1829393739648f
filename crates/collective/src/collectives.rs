//! Typed calls.

use fusestep_tensor::{DType, Element};

use crate::{Buffers, Call, CollectiveError, Communicator, Operation, ReduceOp};

fn in_place<T: Element>(operation: Operation, buffer: &mut [T]) -> Call<'_> {
    Call {
        operation,
        dtype: T::DTYPE,
        counts: None,
        buffers: Buffers::InPlace(bytemuck::cast_slice_mut(buffer)),
    }
}

fn out_of_place<'a, T: Element>(
    operation: Operation,
    counts: Option<&'a [usize]>,
    send: &'a [T],
    receive: &'a mut [T],
) -> Call<'a> {
    Call {
        operation,
        dtype: T::DTYPE,
        counts,
        buffers: Buffers::OutOfPlace {
            send: bytemuck::cast_slice(send),
            receive: bytemuck::cast_slice_mut(receive),
        },
    }
}

/// Typed calls on any communicator. Lengths are in elements; see [`Call`] for the shapes,
/// [`Communicator::execute`] for errors.
///
/// In-place forms and counts for operations that have no method here go through
/// [`Communicator::execute`].
pub trait Collectives: Communicator {
    /// `buffer ← reduce over ranks (buffer)`, on every rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut values = [1.0f32, 10.0 * comm.rank() as f32];
    /// comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
    /// assert_eq!(values, [2.0, 10.0]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn all_reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        reduce: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.execute(in_place(Operation::AllReduce(reduce), buffer))
    }

    /// `receive ← reduce over ranks (send)`, on every rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let (send, mut receive) = ([comm.rank() as i32 + 5], [0]);
    /// comm.all_reduce_into(&send, &mut receive, ReduceOp::Prod).unwrap();
    /// assert_eq!(receive, [30]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn all_reduce_into<T: Element>(
        &mut self,
        send: &[T],
        receive: &mut [T],
        reduce: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::AllReduce(reduce), None, send, receive))
    }

    /// `buffer ← reduce over ranks (buffer)` on the root; other ranks keep theirs.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut value = [comm.rank() as i64];
    /// comm.reduce(&mut value, ReduceOp::Max, 0).unwrap();
    /// assert_eq!(value, [1]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        reduce: ReduceOp,
        root: usize,
    ) -> Result<(), CollectiveError> {
        self.execute(in_place(Operation::Reduce { reduce, root }, buffer))
    }

    /// `buffer ← buffer of the root`.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(3, &Options::default(), |mut comm| {
    /// let mut value = [comm.rank() as u8];
    /// comm.broadcast(&mut value, 2).unwrap();
    /// assert_eq!(value, [2]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
    ) -> Result<(), CollectiveError> {
        self.execute(in_place(Operation::Broadcast { root }, buffer))
    }

    /// `receive ← the blocks of all ranks`, in rank order. Blocks are as equal as can be:
    /// [`even_counts`](crate::even_counts).
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut all = [0.0f64; 2];
    /// comm.all_gather(&[comm.rank() as f64], &mut all).unwrap();
    /// assert_eq!(all, [0.0, 1.0]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn all_gather<T: Element>(
        &mut self,
        block: &[T],
        receive: &mut [T],
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::AllGather, None, block, receive))
    }

    /// [`all_gather`](Self::all_gather) of blocks of any lengths.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let block = vec![comm.rank() as i32; 2 * comm.rank()];
    /// let mut all = [7; 2];
    /// comm.all_gather_counts(&[0, 2], &block, &mut all).unwrap();
    /// assert_eq!(all, [1, 1]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn all_gather_counts<T: Element>(
        &mut self,
        counts: &[usize],
        block: &[T],
        receive: &mut [T],
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::AllGather, Some(counts), block, receive))
    }

    /// `block ← own block of reduce over ranks (send)`. Blocks are as equal as can be:
    /// [`even_counts`](crate::even_counts).
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut block = [0.0f32];
    /// comm.reduce_scatter(&[1.0, 2.0], &mut block, ReduceOp::Sum).unwrap();
    /// assert_eq!(block, [[2.0], [4.0]][comm.rank()]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn reduce_scatter<T: Element>(
        &mut self,
        send: &[T],
        block: &mut [T],
        reduce: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::ReduceScatter(reduce), None, send, block))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) to blocks of any lengths.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut block = vec![0.0f32; [0, 2][comm.rank()]];
    /// comm.reduce_scatter_counts(&[0, 2], &[1.0, 2.0], &mut block, ReduceOp::Average).unwrap();
    /// assert_eq!(block, [vec![], vec![1.0, 2.0]][comm.rank()]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn reduce_scatter_counts<T: Element>(
        &mut self,
        counts: &[usize],
        send: &[T],
        block: &mut [T],
        reduce: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let operation = Operation::ReduceScatter(reduce);
        self.execute(out_of_place(operation, Some(counts), send, block))
    }

    /// `block ← own block of the root's send`; blocks of one length. Other ranks' `send` is not
    /// looked at.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut block = [0u8];
    /// comm.scatter(&[8, 9], &mut block, 0).unwrap();
    /// assert_eq!(block, [[8], [9]][comm.rank()]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn scatter<T: Element>(
        &mut self,
        send: &[T],
        block: &mut [T],
        root: usize,
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::Scatter { root }, None, send, block))
    }

    /// `receive ← the blocks of all ranks` on the root; blocks of one length. Other ranks'
    /// `receive` is not touched.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut all = vec![0i64; if comm.rank() == 1 { 2 } else { 0 }];
    /// comm.gather(&[comm.rank() as i64], &mut all, 1).unwrap();
    /// assert_eq!(all, [vec![], vec![0, 1]][comm.rank()]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn gather<T: Element>(
        &mut self,
        block: &[T],
        receive: &mut [T],
        root: usize,
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::Gather { root }, None, block, receive))
    }

    /// Block `i` of rank `j` becomes block `j` of rank `i`; blocks of one length.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let r = comm.rank() as i32;
    /// let mut receive = [0; 2];
    /// comm.all_to_all(&[10 * r, 10 * r + 1], &mut receive).unwrap();
    /// assert_eq!(receive, [r, 10 + r]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        receive: &mut [T],
    ) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::AllToAll, None, send, receive))
    }

    /// Hands elements to rank `to`, which calls [`receive`](Self::receive); returns when they are
    /// there.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut value = [0.5f32];
    /// match comm.rank() {
    ///     0 => comm.send(&[2.5f32], 1).unwrap(),
    ///     _ => comm.receive(&mut value, 0).unwrap(),
    /// }
    /// assert_eq!(value, [[0.5], [2.5]][comm.rank()]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn send<T: Element>(&mut self, elements: &[T], to: usize) -> Result<(), CollectiveError> {
        self.execute(out_of_place(Operation::Send { to }, None, elements, &mut []))
    }

    /// Takes the elements that rank `from` hands over by [`send`](Self::send).
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut elements = [comm.rank() as i64; 3];
    /// match comm.rank() {
    ///     0 => comm.receive(&mut elements, 1).unwrap(),
    ///     _ => comm.send(&elements, 0).unwrap(),
    /// }
    /// assert_eq!(elements, [1; 3]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn receive<T: Element>(
        &mut self,
        elements: &mut [T],
        from: usize,
    ) -> Result<(), CollectiveError> {
        self.execute(in_place(Operation::Receive { from }, elements))
    }

    /// Returns when all ranks have called it.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// comm.barrier().unwrap();
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.execute(Call {
            operation: Operation::Barrier,
            dtype: DType::U8,
            counts: None,
            buffers: Buffers::InPlace(&mut []),
        })
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}
