import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Program {
    /// The sample program, next to the tests.
    private static let program: URL? = {
        let bundles = Bundle.allBundles.map { $0.bundleURL.deletingLastPathComponent() }
        let folders = bundles + [URL(fileURLWithPath: CommandLine.arguments[0]).deletingLastPathComponent()]
        return folders.map { $0.appendingPathComponent("mlxinfer-chat") }.first { FileManager.default.isExecutableFile(atPath: $0.path) }
    }()

    /// The status, the answer and the notes of the program.
    static func run(_ words: [String], input: String = "", interruptAfter delay: Duration? = nil) async throws -> (Int32, String, String) {
        let process = Process()
        let (output, errors, prompts) = (Pipe(), Pipe(), Pipe())
        let program: URL = try #require(program)
        process.executableURL = program
        process.arguments = ["--socket", LiveServer.shared.path, "--temperature", "0"] + words
        (process.standardOutput, process.standardError, process.standardInput) = (output, errors, prompts)
        try process.runWithSignals()
        try prompts.fileHandleForWriting.write(contentsOf: Data(input.utf8))
        try prompts.fileHandleForWriting.close()
        if let delay {
            let first = output.fileHandleForReading.availableData
            try await Task.sleep(for: delay)
            process.interrupt()
            #expect(!first.isEmpty)
        }
        let text = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        let notes = String(decoding: errors.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        process.waitUntilExit()
        return (process.terminationStatus, text, notes)
    }

    @Test func oneQuestion() async throws {
        try await LiveServer.shared.client.waitUntilReady()
        let (status, text, notes) = try await Self.run(["--max-tokens", "24", "What", "is", "the capital of France?"])
        #expect(status == 0 && text.contains("Paris") && notes.contains("tokens/s"))
    }

    @Test func aConversation() async throws {
        let (status, text, notes) = try await Self.run(["--max-tokens", "8", "--system", "Be brief."], input: "Hi\n\nAnd you?\n")
        #expect(status == 0 && !text.isEmpty && notes.components(separatedBy: "tokens/s").count == 3 && notes.contains("from the cache"))
    }

    @Test func controlCStopsTheAnswer() async throws {
        let (status, text, notes) = try await Self.run(["Tell me a very long story about a fox."], interruptAfter: .milliseconds(1))
        #expect(status == 130 && !text.isEmpty && notes.contains("[stopped]"))
        #expect(try await eventually { try await LiveServer.shared.metric("mlxinfer_num_requests_running") == 0 })
    }

    @Test func mistakes() async throws {
        #expect(try await Self.run(["--prot", "1"]).0 == 2)
        let (status, _, notes) = try await Self.run(["--model", "nope", "Hi"])
        #expect(status == 1 && notes.contains("nope"))
    }
}
