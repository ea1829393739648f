//! Communicators that add something to an inner communicator and pass other calls on.

/// Methods of a [`Communicator`](crate::Communicator) that are passed on to an inner one, by name:
/// `forward_calls!(this => this.inner; rank, world_size);` within its `impl`.
#[macro_export]
macro_rules! forward_calls {
    ($this:ident => $inner:expr; $($method:ident),* $(,)?) => {
        $($crate::forward_calls!(@ $method $this $inner);)*
    };
    (@ rank $this:ident $inner:expr) => {
        fn rank(&self) -> usize { let $this = self; $inner.rank() }
    };
    (@ world_size $this:ident $inner:expr) => {
        fn world_size(&self) -> usize { let $this = self; $inner.world_size() }
    };
    (@ execute $this:ident $inner:expr) => {
        fn execute(&mut self, call: $crate::Call<'_>) -> Result<(), $crate::CollectiveError> {
            let $this = self;
            $inner.execute(call)
        }
    };
    (@ split $this:ident $inner:expr) => {
        fn split(
            &mut self,
            membership: Option<$crate::Membership>,
        ) -> Result<Option<Box<dyn $crate::Communicator>>, $crate::CollectiveError> {
            let $this = self;
            $inner.split(membership)
        }
    };
    (@ set_context $this:ident $inner:expr) => {
        fn set_context(&mut self, context: $crate::CallContext) {
            let $this = self;
            $inner.set_context(context)
        }
    };
    (@ aborter $this:ident $inner:expr) => {
        fn aborter(&self) -> $crate::Aborter { let $this = self; $inner.aborter() }
    };
    (@ recorder $this:ident $inner:expr) => {
        fn recorder(&self) -> &$crate::FlightRecorder { let $this = self; $inner.recorder() }
    };
    (@ allocate $this:ident $inner:expr) => {
        fn allocate(&mut self, len: usize) -> Result<$crate::HostMemory, $crate::CollectiveError> {
            let $this = self;
            $inner.allocate(len)
        }
    };
    (@ shares_memory $this:ident $inner:expr) => {
        fn shares_memory(&self) -> bool { let $this = self; $inner.shares_memory() }
    };
    (@ reduce_update $this:ident $inner:expr) => {
        fn reduce_update(
            &mut self,
            call: $crate::ReduceUpdate<'_>,
            work: &mut dyn FnMut($crate::RankMemory<'_>),
        ) -> Result<(), $crate::CollectiveError> {
            let $this = self;
            $inner.reduce_update(call, work)
        }
    };
    (@ device $this:ident $inner:expr) => {
        fn device(&self) -> Option<u32> { let $this = self; $inner.device() }
    };
    (@ execute_on_device $this:ident $inner:expr) => {
        fn execute_on_device(
            &mut self,
            call: $crate::DeviceCall<'_>,
        ) -> Result<(), $crate::CollectiveError> {
            let $this = self;
            $inner.execute_on_device(call)
        }
    };
    (@ finish_on_device $this:ident $inner:expr) => {
        fn finish_on_device(&mut self) -> Result<(), $crate::CollectiveError> {
            let $this = self;
            $inner.finish_on_device()
        }
    };
    (@ control $this:ident $inner:expr) => {
        fn control(&mut self) -> Option<&mut dyn $crate::Communicator> {
            let $this = self;
            $inner.control()
        }
    };
    (@ failure $this:ident $inner:expr) => {
        fn failure(&self) -> Option<$crate::CollectiveError> { let $this = self; $inner.failure() }
    };
}
