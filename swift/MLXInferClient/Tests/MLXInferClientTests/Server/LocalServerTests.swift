import Foundation
import Testing

@testable import MLXInferClient

/// Servers that are small programs: what becomes of them, whatever they do.
struct LocalServerTests {
    private static func server(_ script: String, restart: LocalServer.Restart = .init(), log: Log = Log()) -> LocalServer {
        let command = ServerCommand([], socket: FaultServer.freshPath(), program: ["/bin/sh", "-c", script])
        return LocalServer(command, restart: restart, readyWithin: .seconds(20), grace: 1) { log.add($0) }
    }

    private static func failure(of server: LocalServer) async -> MLXInferError? {
        do {
            try await server.start()
            return nil
        } catch {
            return MLXInferError(error)
        }
    }

    @Test func oneThatEndsAtOnce() async throws {
        let server = Self.server("echo 'no such model: x' >&2; exit 2")
        let expected = MLXInferError.serverEnded(reason: "the server has ended with status 2", lastWords: "no such model: x")
        #expect(await Self.failure(of: server) == expected)
        #expect(await server.state == .failed(expected))
        #expect(expected.localizedDescription == "the server has ended with status 2: no such model: x")
    }

    @Test func aProgramThatIsNotThere() async throws {
        let none = LocalServer(ServerCommand(["m"], socket: FaultServer.freshPath(), program: []))
        guard case .serverEnded(let reason, "") = await Self.failure(of: none) else {
            Issue.record("no failure")
            return
        }
        #expect(reason.contains("not installed"))
        let wrong = LocalServer(ServerCommand(["m"], socket: FaultServer.freshPath(), program: ["/no/such/program"]))
        guard case .serverEnded("the server has ended with status 127", let words) = await Self.failure(of: wrong) else {
            Issue.record("no failure")
            return
        }
        #expect(words.contains("/no/such/program"))
    }

    @Test func whatItWritesIsHandedOn() async throws {
        let log = Log()
        _ = await Self.failure(of: Self.server("echo one; echo two >&2; printf three; exit 1", log: log))
        #expect(log.lines.prefix(2) == ["one", "two"])
    }

    @Test func oneThatNeverAnswersIsEnded() async throws {
        let mark = FaultServer.freshPath()
        let command = ServerCommand([], socket: FaultServer.freshPath(), program: ["/bin/sh", "-c", "echo $$ > \(mark); exec sleep 60"])
        let server = LocalServer(command, readyWithin: .milliseconds(300), grace: 1) { _ in }
        let failure = await Self.failure(of: server)
        #expect(failure == .serverEnded(reason: "the server did not answer within 0.3 seconds", lastWords: ""))
        let number = try #require(Int32(String(contentsOfFile: mark, encoding: .utf8).trimmingCharacters(in: .whitespacesAndNewlines)))
        #expect(await eventually { kill(number, 0) != 0 })
    }

    @Test func stoppingWhileItStarts() async throws {
        let server = Self.server("exec sleep 60")
        let starting = Task { try await server.start() }
        #expect(await eventually { await server.state == .starting })
        await server.stop()
        await #expect(throws: CancellationError.self) { try await starting.value }
        #expect(await server.state == .stopped)
    }

    @Test func oneThatRunsAlreadyIsFound() async throws {
        let path = FaultServer.freshPath()
        let there = try FaultServer([.read, .send(Transcript.json(#"{"status":"ok"}"#))], path: path)
        let server = LocalServer(ServerCommand(["m"], socket: path, program: ["/bin/false"]))
        try await server.start()
        #expect(await server.state == .ready(ours: false) && !there.requests.isEmpty)
        await server.stop()
        #expect(await server.state == .stopped)
    }

    @Test func theAgentOfLaunchd() async throws {
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: folder) }
        let calls = folder.appendingPathComponent("calls").path
        let launchctl = folder.appendingPathComponent("launchctl").path
        try Data("#!/bin/sh\necho \"$1 ${3##*/}\" >> \(calls)\n".utf8).write(to: URL(fileURLWithPath: launchctl))
        try FileManager.default.setAttributes([.posixPermissions: 0o755], ofItemAtPath: launchctl)
        let list = "<?xml version='1.0' encoding='UTF-8'?><plist version='1.0'><dict><key>Label</key><string>a.b</string></dict></plist>"
        var agent = LaunchAgent(ServerCommand(["m"], socket: "/tmp/x", program: ["/bin/sh", "-c", "echo \"\(list)\""]))
        (agent.launchctl, agent.folder) = (launchctl, folder.appendingPathComponent("Agents").path)
        try await agent.install()
        let file = agent.folder + "/a.b.plist"
        #expect(try String(contentsOfFile: file, encoding: .utf8).contains("a.b"))
        try await agent.remove()
        #expect(!FileManager.default.fileExists(atPath: file))
        let called = try String(contentsOfFile: calls, encoding: .utf8)
        #expect(called == "bootout a.b.plist\nbootstrap a.b.plist\nbootout a.b.plist\n")
    }
}

/// Lines from another thread.
final class Log: Sendable {
    private let kept = Locked([String]())

    func add(_ line: String) { kept.withLock { $0.append(line) } }

    var lines: [String] { kept.withLock { $0 } }
}
