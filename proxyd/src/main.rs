//! The packaged proxyd: the library's `main` and nothing else.

fn main() -> std::process::ExitCode {
    proxyd::main(&[], std::env::args_os().skip(1).collect())
}
