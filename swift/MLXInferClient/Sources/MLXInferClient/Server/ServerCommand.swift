import Foundation

/// How `mlxinfer serve` is called.
public struct ServerCommand: Sendable, Hashable {
    /// The program and the words before `serve`, such as `/opt/homebrew/bin/mlxinfer`.
    public var program: [String]
    /// Models as `mlxinfer serve` takes them: aliases, hub ids, files, `NAME=MODEL`.
    public var models: [String]
    /// More of its options, such as `["--keep-alive", "5m"]`.
    public var options: [String]
    /// Where it listens; nil is ``Endpoint/default``.
    public var socket: String?

    /// - Parameter program: nil looks where ``find()`` does.
    public init(_ models: [String], options: [String] = [], socket: String? = nil, program: [String]? = nil) {
        self.program = program ?? Self.find().map { [$0] } ?? []
        (self.models, self.options, self.socket) = (models, options, socket)
    }

    /// Where a client reaches that server.
    public var endpoint: Endpoint { socket.map { .unix(path: $0) } ?? .default }

    /// The command in the folders of the variable `PATH`, and in those where it is usually installed, as apps have a short `PATH`.
    public static func find() -> String? {
        let listed = (ProcessInfo.processInfo.environment["PATH"] ?? "").split(separator: ":").map(String.init)
        let usual = ["~/.local/bin", "/opt/homebrew/bin", "/usr/local/bin"].map { ($0 as NSString).expandingTildeInPath }
        return (listed + usual).map { $0 + "/mlxinfer" }.first { FileManager.default.isExecutableFile(atPath: $0) }
    }

    /// The whole command line.
    ///
    /// - Throws: ``MLXInferError/serverEnded(reason:lastWords:)`` where there is no program to call.
    func words(_ more: [String] = []) throws(MLXInferError) -> [String] {
        guard !program.isEmpty else {
            throw .serverEnded(reason: "mlxinfer is not installed where apps look for it; say where it is", lastWords: "")
        }
        return program + ["serve"] + models + options + ["--socket", endpoint.description] + more
    }
}
