import Foundation
import MLXInferClient

extension ServerCommand {
    /// The server that the app finds, or starts unless it is in the sandbox. The settings are `Models`, `Program` (the path of `mlxinfer`)
    /// and `AppGroup` (the group whose container has the socket).
    public init(isSandboxed: Bool, container: (String) -> URL?, settings: (String) -> String?) {
        let socket = settings("AppGroup").flatMap(container)?.appendingPathComponent("mlxinfer/api.sock").path
        let models = (settings("Models") ?? "smollm2").split(separator: " ").map(String.init)
        self.init(models, socket: socket, program: isSandboxed ? [] : settings("Program").map { [$0] })
    }
}
