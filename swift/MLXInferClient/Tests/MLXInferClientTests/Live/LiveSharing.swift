import Foundation
import Testing

@testable import MLXInferClient

/// Several apps, one server: one copy of the weights, and one prefix.
extension LiveTests.Sharing {
    /// The instructions that all apps of a company give.
    private static let instructions = (1...40).map { "Rule \($0): answer politely, in few words." }.joined(separator: " ")

    /// Prompt tokens from the cache, as an app prints them: of 400, 390 for instance.
    private func cached(_ notes: String) -> (cached: Int, prompt: Int)? {
        guard let match = notes.firstMatch(of: #/(\d+) of (\d+) prompt tokens from the cache/#) else { return nil }
        return Int(match.1).flatMap { cached in Int(match.2).map { (cached, $0) } }
    }

    @Test func processesShareTheModelAndThePrefix() async throws {
        let server = LiveServer.shared
        try await server.client.waitUntilReady()
        func app(_ name: String) async throws -> String {
            let (status, text, notes) = try await LiveTests.Program.run(
                ["--max-tokens", "4", "--system", Self.instructions, "I am \(name). Hello!"])
            #expect(status == 0 && !text.isEmpty)
            return notes
        }
        _ = try await app("the first app")
        let one = try server.residentBytes()
        let second = try #require(cached(try await app("the second app")))
        #expect(second.prompt > 300 && second.cached > second.prompt - 100)
        let others = try await withThrowingTaskGroup(of: String.self) { group in
            for name in ["Anna", "Ben", "Carl", "Dora", "Emil", "Finn"] { group.addTask { try await app(name) } }
            return try await group.reduce(into: []) { $0.append($1) }
        }
        #expect(others.allSatisfy { (cached($0)?.cached ?? 0) > second.prompt - 100 })
        let eight = try server.residentBytes()
        #expect(eight - one < 64 << 20)  // a copy of the weights has 270 MB
        let sizes = [one, eight].map { String(format: "%.1f MB", Double($0) / 1e6) }
        print(
            "a second process: \(second.cached) of \(second.prompt) prompt tokens from the cache; the server has \(sizes[0]) after one app")
        print("and \(sizes[1]) after eight")
    }
}
