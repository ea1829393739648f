//! Files of a simulated disk, each call of which a schedule sees first.

/// Implements `Files` for a type whose method `disk` asks the schedule and returns the disk.
macro_rules! files_of_disk {
    ($files:ty) => {
        impl fusestep_tensor_file::Files for $files {
            fn read(&self, path: &std::path::Path) -> std::io::Result<Vec<u8>> {
                self.disk()?.read(path)
            }
            fn kind(
                &self,
                path: &std::path::Path,
            ) -> std::io::Result<fusestep_tensor_file::FileKind> {
                self.disk()?.kind(path)
            }
            fn look(&self, path: &std::path::Path) -> std::io::Result<fusestep_tensor_file::Look> {
                self.disk()?.look(path)
            }
            fn lock(&self, path: &std::path::Path) -> std::io::Result<fusestep_tensor_file::Lock> {
                self.disk()?.lock(path)
            }
            fn write_new(&self, path: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
                self.disk()?.write_new(path, bytes)
            }
            fn rename(&self, from: &std::path::Path, to: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.rename(from, to)
            }
            fn link(&self, from: &std::path::Path, to: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.link(from, to)
            }
            fn sync_folder(&self, path: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.sync_folder(path)
            }
            fn create_folder(&self, path: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.create_folder(path)
            }
            fn list(&self, path: &std::path::Path) -> std::io::Result<Vec<String>> {
                self.disk()?.list(path)
            }
            fn remove_file(&self, path: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.remove_file(path)
            }
            fn lives(&self, part: &std::path::Path) -> Option<bool> {
                self.disk().ok()?.lives(part)
            }
            fn age(&self, path: &std::path::Path) -> std::io::Result<std::time::Duration> {
                self.disk()?.age(path)
            }
            fn touched_ns(&self, path: &std::path::Path) -> std::io::Result<i64> {
                self.disk()?.touched_ns(path)
            }
            fn remove_folder(&self, path: &std::path::Path) -> std::io::Result<()> {
                self.disk()?.remove_folder(path)
            }
        }
    };
}
