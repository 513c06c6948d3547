import Foundation
import MLXInferClient
import Testing

// The snippets of docs/swift.md and of the package's README, as they stand there: a test of the repository compares them with this file.

#if canImport(FoundationModels, _version: 2)
    import FoundationModels
    import MLXInferFoundationModels

    @available(macOS 27, iOS 27, *)
    private func askInASession() async throws {
        let model = MLXInferLanguageModel(model: "smollm2", endpoint: .default)
        let session = LanguageModelSession(model: model, instructions: "Be short.")
        session.prewarm()
        print(try await session.respond(to: "What is the capital of France?").content)
    }
#endif

struct Trip: GuidedObject, Decodable, Sendable {
    let city: String
    let days: Int
    let packing: [String]?

    static var properties: [Property<Trip>] {
        Property("city", \.city, .string(maxLength: 40))
        Property("days", \.days, .integer(in: 1...14))
        Property("packing", \.packing, .array(of: .string(maxLength: 20), count: 0...3), "What to take along")
    }
}

extension LiveTests {
    @Suite struct Snippets {
        private let client = LiveServer.shared.client

        @Test func asking() async throws {
            for try await event in client.chat([.user("What is the capital of France?")]) {
                if case .text(let piece) = event { print(piece, terminator: "") }
            }
        }

        @Test func errors() async throws {
            let question = "What is the capital of France?"
            do {
                let answer = try await client.respond(to: question)
                print(answer.text)
            } catch is CancellationError {
                // the task was cancelled: nothing to tell anybody
            } catch let error as MLXInferError where error.isTooLong {
                print("Begin a new conversation.")
            } catch {
                print(error.localizedDescription)
            }

            do throws(MLXInferError) {
                let answer = try await client.typed { try await $0.respond(to: question) }
                print(answer.text)
            } catch {
                switch error {
                case .serverNotRunning(let place): print("nothing listens at \(place)")
                case .streamInterrupted(let partial, _): print("only this came: \(partial)")
                default: print(error.localizedDescription)
                }
            }
        }

        @Test func guided() async throws {
            let trip = try await client.generate(Trip.self, "A weekend in Rome, as JSON.")
            print(trip.city, trip.days)

            for try await snapshot in client.stream(Trip.self, "A weekend in Rome, as JSON.") {
                print(snapshot.content.city ?? "...", snapshot.content.packing ?? [])
                if let trip = snapshot.value { print(trip.days) }
            }
        }

        // Without a limit of tokens, a small model calls on for minutes: compiled, and not run.
        func tools() async throws {
            let weather = CallableTool("weather", "The weather of a city") { (trip: Trip) in
                "21 degrees in \(trip.city)"
            }
            let request = ChatRequest([.user("What do I need for two days in Rome?")])
            let policy = ToolPolicy(maxRounds: 2, onLimit: .answer)
            let run = try await client.respond(to: request, calling: [weather], policy: policy)
            print(run.response.text, run.results.count)
        }

        @Test func serverOfTheApp() async throws {
            let command = ServerCommand(
                ["smollm2"], options: ["--keep-alive", "5m"], socket: LiveServer.freshSocket(), program: LiveServer.command)
            let server = LocalServer(command)
            try await server.start()
            let answer = try await server.client.respond(to: "Hello")
            print(answer.text)
            await server.stop()
        }

        @Test func models() async throws {
            for model in try await client.models() { print(model.id, model.state ?? .unloaded, model.base ?? "") }
            let tokens = try await client.countTokens([.user("Hello")])
            #expect(tokens > 0)
        }

        func pictures(png: Data) async throws {
            let parts: [ContentPart] = [.attachment(data: png, mimeType: "image/png"), .text("What is in this picture?")]
            let answer = try await client.respond(to: [.user(parts)])
            print(answer.text, answer.usage?.imageTokens ?? 0)
        }

        // What needs models that are not here is compiled, and not run.
        func compiled() async throws {
            let vectors = try await client.embed(["a text", "another text"], model: "Qwen/Qwen3-Embedding-0.6B")
            let answer = try await client.respond(to: ChatRequest([.user("Ahoy!")], model: "smollm2:pirate"))
            try await client.unload("smollm2")
            print(vectors.count, answer.text)
        }
    }
}
