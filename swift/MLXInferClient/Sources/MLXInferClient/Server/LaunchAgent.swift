import Foundation

/// Lets launchd run the server: it starts when an app connects to its socket, in whichever app that is, and again after it has ended.
///
/// ```swift
/// let agent = LaunchAgent(ServerCommand(["smollm2"]))
/// try await agent.install()
/// try await agent.client.waitUntilReady()
/// ```
///
/// An app in the sandbox cannot install one.
public struct LaunchAgent: Sendable {
    public let command: ServerCommand
    var launchctl = "/bin/launchctl"
    var folder = ("~/Library/LaunchAgents" as NSString).expandingTildeInPath

    public init(_ command: ServerCommand) { self.command = command }

    /// For requests to the server.
    public var client: Client { Client(command.endpoint) }

    /// Writes the property list that `mlxinfer serve --install` prints to `~/Library/LaunchAgents`, in place of the one before, and hands it
    /// to launchd.
    ///
    /// - Throws: ``MLXInferError/serverEnded(reason:lastWords:)`` with what `mlxinfer` or `launchctl` says.
    public func install() async throws {
        try await IOThread.result { _ in
            let list = Data(try Self.output(of: command.words(["--install"])).utf8)
            let file = try file(of: list)
            try Self.asFailure("the property list cannot be written") {
                try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
                try list.write(to: file, options: .atomic)
            }
            _ = try? Self.output(of: [launchctl, "bootout", domain, file.path])
            _ = try Self.output(of: [launchctl, "bootstrap", domain, file.path])
        }
    }

    /// Takes the server from launchd, which ends it, and removes the property list.
    public func remove() async throws {
        try await IOThread.result { _ in
            let file = try file(of: Data(try Self.output(of: command.words(["--install"])).utf8))
            _ = try? Self.output(of: [launchctl, "bootout", domain, file.path])
            try Self.asFailure("the property list cannot be removed") { try FileManager.default.removeItem(at: file) }
        }
    }

    private var domain: String { "gui/\(getuid())" }

    /// Where launchd expects a property list, whose label is its name.
    private func file(of list: Data) throws -> URL {
        let properties = try? PropertyListSerialization.propertyList(from: list, format: nil) as? [String: Any]
        guard let label = properties?["Label"] as? String else {
            throw MLXInferError.serverEnded(reason: "no property list came", lastWords: String(decoding: list.prefix(500), as: UTF8.self))
        }
        return URL(fileURLWithPath: folder).appendingPathComponent(label + ".plist")
    }

    private static func asFailure(_ what: String, _ work: () throws -> Void) throws(MLXInferError) {
        do {
            try work()
        } catch {
            throw .serverEnded(reason: what, lastWords: error.localizedDescription)
        }
    }

    /// What a program prints.
    private static func output(of words: [String]) throws -> String {
        let (process, output, errors) = (Process(), Pipe(), Pipe())
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        process.arguments = words
        (process.standardInput, process.standardOutput, process.standardError) = (FileHandle.nullDevice, output, errors)
        try asFailure("\(words[0]) cannot be started") { try process.runWithSignals() }
        let text = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        let said = String(decoding: errors.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        process.waitUntilExit()
        guard process.terminationStatus == 0 else {
            let reason = "\(words[0]) has ended with status \(process.terminationStatus)"
            throw MLXInferError.serverEnded(reason: reason, lastWords: said.trimmingCharacters(in: .whitespacesAndNewlines))
        }
        return text
    }
}
