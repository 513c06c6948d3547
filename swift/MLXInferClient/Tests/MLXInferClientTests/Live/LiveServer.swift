import Foundation

@testable import MLXInferClient

/// A real server, as `MLXINFER_COMMAND` starts it, on a socket of its own. It ends with this process, however that ends.
/// `@unchecked`, because tests start and stop a server one after the other.
final class LiveServer: @unchecked Sendable {
    /// The command's words, such as `python -m mlxinfer`; nil where live tests are not wanted.
    static let command: [String]? = ProcessInfo.processInfo.environment["MLXINFER_COMMAND"].flatMap { line in
        let words = line.split(separator: " ").map(String.init)
        return words.isEmpty ? nil : words
    }
    static let model = ProcessInfo.processInfo.environment["MLXINFER_MODEL"] ?? "smollm2"
    /// The server that most tests share.
    static let shared = LiveServer()

    /// Ends the server when its own standard input ends, be it that this process is gone, and clears up behind it.
    private static let guardian = #""$@" & child=$!; read -r line; kill "$child"; wait "$child"; rm -rf "$0""#

    let folder: URL
    let path: String
    private let options: [String]
    private let model: String
    private var process = Process()
    private var leash = Pipe()

    init(_ options: [String] = [], model: String = LiveServer.model) {
        self.model = model
        folder = FileManager.default.temporaryDirectory.appendingPathComponent("mlx-\(UUID().uuidString.prefix(13))")
        path = folder.appendingPathComponent("s").path
        self.options = options
        start()
    }

    deinit { stop() }

    var client: Client { Client(.unix(path: path), timeouts: Timeouts(silence: .seconds(60)), reconnect: Reconnect(upTo: .seconds(60))) }

    /// What the server has printed.
    var log: String { (try? String(contentsOf: folder.appendingPathComponent("log"), encoding: .utf8)) ?? "" }

    /// When the last request of those that ended so was over, to the millisecond.
    func lastEnd(status: Int) -> Date? {
        let line = log.split(separator: "\n").last { $0.contains("\"status\": \(status),") }
        guard let line, case .object(let fields) = try? JSONDecoder().decode(JSONValue.self, from: Data(line.utf8)) else { return nil }
        guard case .string(let time) = fields["time"] else { return nil }
        return try? Date(time, strategy: .iso8601.year().month().day().timeZone(separator: .colon).time(includingFractionalSeconds: true))
    }

    func start() {
        try? FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true, attributes: [.posixPermissions: 0o700])
        let file = folder.appendingPathComponent("log")
        try? Data().write(to: file)
        (process, leash) = (Process(), Pipe())
        process.executableURL = URL(fileURLWithPath: "/bin/sh")
        process.arguments = ["-c", Self.guardian, folder.path] + (Self.command ?? []) + ["serve", model, "--socket", path] + options
        process.standardInput = leash
        let output = try? FileHandle(forWritingTo: file)
        (process.standardOutput, process.standardError) = (output, output)
        try? process.runWithSignals()
    }

    /// A path for the socket of another server, in a folder that only this user may enter, as servers want it.
    static func freshSocket() -> String {
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent("mlx-\(UUID().uuidString.prefix(13))")
        try? FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true, attributes: [.posixPermissions: 0o700])
        return folder.appendingPathComponent("s").path
    }

    /// Tells the server to end, and waits until it has.
    func stop() {
        try? leash.fileHandleForWriting.close()
        if process.isRunning { process.waitUntilExit() }
    }

    /// The sum of a counter or gauge over all its labels.
    func metric(_ name: String) async throws -> Double {
        try await client.metrics().split(separator: "\n").filter { $0.hasPrefix(name + "{") || $0.hasPrefix(name + " ") }
            .compactMap { Double($0.split(separator: " ").last ?? "") }.reduce(0, +)
    }
}

extension LiveServer {
    /// Ends the server at once, without a word to anybody.
    func kill() throws { try signal("KILL") }

    /// Sends a signal to the server.
    func signal(_ name: String) throws { _ = try Self.shell("pkill -\(name) -P \(process.processIdentifier)") }

    /// The server's resident memory, in bytes.
    func residentBytes() throws -> Int {
        let kilobytes = try Self.shell("ps -o rss= -p $(pgrep -P \(process.processIdentifier))")
        return (Int(kilobytes.trimmingCharacters(in: .whitespacesAndNewlines)) ?? 0) << 10
    }

    /// What a line of the shell prints.
    static func shell(_ line: String) throws -> String {
        let (process, output) = (Process(), Pipe())
        process.executableURL = URL(fileURLWithPath: "/bin/sh")
        process.arguments = ["-c", line]
        process.standardOutput = output
        try process.run()
        defer { process.waitUntilExit() }
        return String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
    }
}
