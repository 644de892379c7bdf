//! (zygote)

pub fn main(_args: Vec<std::ffi::OsString>) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
